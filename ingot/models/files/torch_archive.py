"""Tensors out of a file that torch saved, without torch and without running what is in it.

Such a file is a zip of raw storages and a pickle that says how tensors lie in them. The pickle is read by a reader that
knows three names and refuses every other, so that it can make dicts, lists, plain values and tensors, and nothing else.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ingot.errors import ModelError

Tensor: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
DTYPES = {"HalfStorage": np.float16, "FloatStorage": np.float32}
LARGEST_PICKLE = 16 << 20


@dataclass(frozen=True, slots=True)
class _Storage:
    """What a storage's name in the pickle stands for."""

    dtype: type


def read(file: Path) -> Any:
    """What the file holds, its tensors as numpy's. Raises ModelError for what is not as torch writes it."""
    try:
        with zipfile.ZipFile(file) as archive:
            return _Reader(archive).load()
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, ValueError, TypeError, EOFError, OSError) as error:
        raise ModelError(f"{file.name} cannot be read: {str(error)[:200] or type(error).__name__}") from error


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile) -> None:
        listed = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(listed) != 1:
            raise ValueError("it holds no data.pkl, so that torch did not write it")
        if archive.getinfo(listed[0]).file_size > LARGEST_PICKLE:
            raise ValueError("its data.pkl is larger than any list of tensors")
        super().__init__(io.BytesIO(archive.read(listed[0])))
        self._archive, self._root = archive, listed[0].removesuffix("data.pkl")
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in DTYPES:
            return _Storage(DTYPES[name])
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Any) -> Tensor:
        kind, storage, key, _, size = pid
        if kind != "storage" or not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("it refers to something that is no storage")
        if key not in self._storages:
            found: Tensor = np.frombuffer(self._archive.read(f"{self._root}data/{key}"), storage.dtype)
            if found.size != size:
                raise ValueError(f"storage {key} is not as long as it should be")
            self._storages[key] = found
        return self._storages[key]


def _tensor(storage: Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> Tensor:
    """A tensor as it lies in its storage, which need not be row by row."""
    if len(shape) != len(strides) or min((*shape, *strides, offset), default=0) < 0:
        raise ValueError("a tensor's shape and strides do not fit")
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= storage.size:
        raise ValueError("a tensor is larger than what it lies in")
    steps = [stride * storage.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)
