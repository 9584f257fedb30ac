"""Tensor files without mlx or torch: writes safetensors one tensor at a time, reads torch archives.

Converting a model never holds more than one of its tensors. The safetensors header comes first in the file but is known
last; room for it is reserved and filled in at the end, padded with the spaces that the format allows.

A torch archive is a zip of raw storages and a pickle that describes the tensors in them. The unpickler accepts three
names and refuses every other, so that it makes dicts, lists, plain values and tensors, and nothing else.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from ingot.errors import ModelError

SHARD_BYTES = 4 << 30
ENTRY_ROOM = 128  # bytes of header for one tensor, besides its name
NumpyTensor: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
STORAGE_DTYPES = {"HalfStorage": np.float16, "FloatStorage": np.float32}
LARGEST_PICKLE = 16 << 20

_DTYPES = {"float32": "F32", "float16": "F16", "uint32": "U32", "uint8": "U8"}


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A named array ready to be written. `bfloat16` says that the uint16 array holds bfloat16 numbers."""

    name: str
    array: np.ndarray
    bfloat16: bool = False

    @property
    def dtype(self) -> str:
        return "BF16" if self.bfloat16 else _DTYPES[self.array.dtype.name]


@dataclass(slots=True)
class _Shard:
    stream: BinaryIO
    path: Path
    room: int
    entries: dict[str, dict[str, object]] = field(default_factory=dict)
    size: int = 0

    def add(self, tensor: NamedTensor) -> None:
        data = np.ascontiguousarray(tensor.array)
        begin, self.size = self.size, self.size + data.nbytes
        self.entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(data.shape),
            "data_offsets": [begin, self.size],
        }
        self.stream.write(data.data)

    def close(self) -> None:
        header = json.dumps({"__metadata__": {"format": "mlx"}, **self.entries}, separators=(",", ":")).encode()
        if len(header) > self.room:
            raise ValueError("the safetensors header outgrew the room reserved for it")
        self.stream.seek(0)
        self.stream.write(self.room.to_bytes(8, "little") + header.ljust(self.room))
        self.stream.close()


def write_safetensors(
    folder: Path, groups: Iterable[list[NamedTensor]], names: list[str], shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes model.safetensors, or numbered parts and their index where it would be larger than `shard_bytes`.

    `groups` are tensors that belong together (a layer's packed weight, scales and biases) and are written as they
    come; `names` are all the names that may come.
    """
    room = -(-(64 + sum(len(name) + ENTRY_ROOM for name in names)) // 8) * 8
    shards: list[_Shard] = []
    try:
        for group in groups:
            incoming = sum(tensor.array.nbytes for tensor in group)
            if not shards or (shards[-1].size and shards[-1].size + incoming > shard_bytes):
                shards.append(_open_shard(folder, len(shards), room))
            for tensor in group:
                shards[-1].add(tensor)
        for shard in shards:
            shard.close()
    finally:
        for shard in shards:
            shard.stream.close()
    _name_shards(folder, shards)


def _open_shard(folder: Path, number: int, room: int) -> _Shard:
    path = folder / f"part-{number}.safetensors"
    stream = path.open("wb")
    stream.seek(8 + room)
    return _Shard(stream, path, room)


def _name_shards(folder: Path, shards: list[_Shard]) -> None:
    if len(shards) == 1:
        shards[0].path.rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard.path.rename(folder / name)
        weight_map |= dict.fromkeys(shard.entries, name)
    index = {"metadata": {"total_size": sum(shard.size for shard in shards)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class _Storage:
    """The meaning of a storage's name in the pickle."""

    dtype: type


def read_torch_archive(file: Path) -> Any:
    """The contents of the file, with tensors as numpy arrays. Raises ModelError for what torch does not write."""
    try:
        with zipfile.ZipFile(file) as archive:
            return _TensorUnpickler(archive).load()
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, ValueError, TypeError, EOFError, OSError) as error:
        raise ModelError(f"{file.name} cannot be read: {str(error)[:200] or type(error).__name__}") from error


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile) -> None:
        listed = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(listed) != 1:
            raise ValueError("it holds no data.pkl, so torch did not write it")
        if archive.getinfo(listed[0]).file_size > LARGEST_PICKLE:
            raise ValueError("its data.pkl is larger than any list of tensors")
        super().__init__(io.BytesIO(archive.read(listed[0])))
        self._archive, self._root = archive, listed[0].removesuffix("data.pkl")
        self._storages: dict[str, NumpyTensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and name in STORAGE_DTYPES:
            return _Storage(STORAGE_DTYPES[name])
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Any) -> NumpyTensor:
        kind, storage, key, _, size = pid
        if kind != "storage" or not isinstance(storage, _Storage):
            raise pickle.UnpicklingError("it refers to something that is no storage")
        if key not in self._storages:
            found: NumpyTensor = np.frombuffer(self._archive.read(f"{self._root}data/{key}"), storage.dtype)
            if found.size != size:
                raise ValueError(f"storage {key} is not as long as it should be")
            self._storages[key] = found
        return self._storages[key]


def _rebuild_tensor(
    storage: NumpyTensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
) -> NumpyTensor:
    """A view of a storage, which need not be contiguous."""
    if len(shape) != len(strides) or min((*shape, *strides, offset), default=0) < 0:
        raise ValueError("a tensor's shape and strides do not fit")
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= storage.size:
        raise ValueError("a tensor is larger than its storage")
    steps = [stride * storage.itemsize for stride in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)
