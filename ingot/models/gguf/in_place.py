"""Tensors that stay in a GGUF file, as arrays: what converting the file would have written, read when it is needed.

The native kernels read them. Without those they are read at once, which takes more memory for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from ingot.errors import ModelError
from ingot.kernels import native
from ingot.models.files.gguf_files import ReferencedTensor, References, references_in
from ingot.models.gguf.file import MAGIC
from ingot.models.gguf.quant_types import PACKED_BITS, SMALL, head_order, pack
from ingot.models.pace import pause

NUMBERS = {Kind.F32: mx.float32, Kind.F16: mx.float16, Kind.BF16: mx.bfloat16}


def with_file(classes: Callable[..., tuple[type, type]], folder: Path) -> Callable[..., tuple[type, type]]:
    """What finds a model's classes, but the model is given the weights, too, that are not in its folder."""
    references = references_in(folder)
    if references is None:
        return classes
    elsewhere = references

    def found(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = classes(config=config)

        class InPlace(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                whole = weights | arrays(elsewhere)
                return super().sanitize(whole) if hasattr(model_class, "sanitize") else whole

        return InPlace, args_class

    return found


def arrays(references: References) -> dict[str, mx.array]:
    """The tensors by name, packed ones with their scales and biases. Raises ModelError where a file is not as it
    was."""
    references.check()
    files = [_Source(file.path, file.size, file.changed_ns) for file in references.files]
    made: dict[str, mx.array] = {}
    for name, tensor in references.tensors.items():
        try:
            parts = _read(tensor, files)
        except (LookupError, ValueError, TypeError, ArithmeticError, OSError, RuntimeError) as error:
            raise ModelError(f"the tensor {name!r} cannot be read from its GGUF file: {error}") from error
        names = [name, *(f"{name.rpartition('.')[0]}.{part}" for part in ("scales", "biases"))]
        made |= dict(zip(names, parts, strict=False))
    return made


class _Source:
    """A file that tensors are read from: by the native kernels where they are there, later, or at once."""

    def __init__(self, path: str, size: int, changed_ns: int) -> None:
        self.path = path
        try:
            self.lazy = native.gguf_file(path, size, changed_ns)
        except RuntimeError as error:
            raise ModelError(str(error)) from error
        if self.lazy is None:
            with Path(path).open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise ModelError(f"{path} is no GGUF file")


def _read(tensor: ReferencedTensor, files: list[_Source]) -> list[mx.array]:
    kind = Kind[tensor.kind]
    block, size = GGML_QUANT_SIZES[kind]
    *outer, columns = tensor.shape
    row_bytes, rows = columns // block * size, math.prod(outer) // len(tensor.pieces)
    head = rows // tensor.heads if tensor.heads else 0
    pieces = [(files[number], offset) for number, offset in tensor.pieces]
    if pieces[0][0].lazy is None:
        parts = _read_now(kind, pieces, rows, row_bytes, head)
    else:
        lazy = [(file.lazy, offset) for file, offset in pieces]
        if kind in SMALL:
            parts = native.file_packed(lazy, rows, row_bytes, head, PACKED_BITS[kind], minima=SMALL[kind])
        else:
            parts = [native.file_bytes(lazy, rows, row_bytes, head)]
    if kind in NUMBERS:
        parts = [parts[0].view(NUMBERS[kind])]
    return [part.reshape(*outer, -1) for part in parts]


def _read_now(kind: Kind, pieces: list[tuple[_Source, int]], rows: int, row_bytes: int, head: int) -> list[mx.array]:
    raw = np.concatenate(
        [np.fromfile(file.path, np.uint8, rows * row_bytes, offset=offset) for file, offset in pieces]
    ).reshape(-1, row_bytes)
    if head:
        raw = raw[head_order(len(raw), head)]
    pause()
    if kind not in SMALL:
        return [mx.array(raw)]
    packed = pack(raw, kind)
    assert packed.biases is not None, "these formats have biases"
    return [mx.array(packed.weight), *(mx.array(part.astype(np.float16)) for part in (packed.scales, packed.biases))]
