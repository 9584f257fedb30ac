"""What is written of a record, wherever it goes: which tokens, which tensors, and in what order. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "I64": 8, "U8": 1}


@dataclass(frozen=True, slots=True)
class TensorShape:
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return SIZES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The tokens of one node of the index, and what its record holds, in order.

    `deltas` has (begin, end, number of tensors) of each layer, None for recurrent ones; `checkpoint` says which parts
    of each layer's state there are.
    """

    tokens: tuple[int, ...]
    begin: int
    landmark: bool
    deltas: tuple[tuple[int, int, int] | None, ...]
    checkpoint: tuple[tuple[bool, ...], ...] | None
    tensors: tuple[TensorShape, ...]

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def whole(self) -> bool:
        """Whether there are as many tensors as it speaks of, and some tokens."""
        held = sum(delta[2] for delta in self.deltas if delta is not None)
        held += sum(sum(layer) for layer in self.checkpoint or ())
        return bool(self.tokens) and held == len(self.tensors)


def listed(record: StoredRecord) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "tokens": record.tokens,
        "begin": record.begin,
        "landmark": record.landmark,
        "deltas": record.deltas,
        "checkpoint": record.checkpoint,
        "tensors": [[tensor.dtype, *tensor.shape] for tensor in record.tensors],
    }


def fields_of(stated: Mapping[str, Any]) -> dict[str, Any]:
    """A record's fields, from what `listed` made. Raises TypeError, ValueError or KeyError where it makes no sense."""
    checkpoint = stated["checkpoint"]
    return {
        "tokens": tuple(int(token) for token in stated["tokens"]),
        "begin": int(stated["begin"]),
        "landmark": bool(stated["landmark"]),
        "deltas": tuple(None if delta is None else _triple(delta) for delta in stated["deltas"]),
        "checkpoint": None
        if checkpoint is None
        else tuple(tuple(bool(part) for part in layer) for layer in checkpoint),
        "tensors": tuple(_tensor(tensor) for tensor in stated["tensors"]),
    }


def entries(names: Sequence[str], tensors: Sequence[TensorShape]) -> dict[str, Any]:
    """Tensors that lie one behind another, as a safetensors header states them."""
    stated, at = {}, 0
    for name, tensor in zip(names, tensors, strict=True):
        offsets = [at, at + tensor.nbytes]
        stated[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        at += tensor.nbytes
    return stated


def _triple(stated: Sequence[Any]) -> tuple[int, int, int]:
    begin, end, count = (int(number) for number in stated)
    return begin, end, count


def _tensor(stated: Sequence[Any]) -> TensorShape:
    dtype, *shape = stated
    if dtype not in SIZES or not all(isinstance(size, int) and 0 < size < 1 << 32 for size in shape):
        raise ValueError("no tensor")
    return TensorShape(dtype, tuple(shape))
