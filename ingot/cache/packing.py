"""Records as bytes and back, for archives. Only the engine thread may call anything here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ingot.cache.archive import ArchivedRecord, ArchiveError, TensorShape
from ingot.cache.records import Checkpoint, KVDelta, Record

_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int32: "I32",
    mx.uint32: "U32",
    mx.int64: "I64",
    mx.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BYTES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U8": "u1"}


def described(record: Record, salt: str, parent: int, tokens: tuple[int, ...], *, landmark: bool) -> ArchivedRecord:
    deltas = tuple(None if delta is None else (delta.begin, delta.end, len(delta.arrays)) for delta in record.deltas)
    checkpoint = record.checkpoint
    return ArchivedRecord(
        salt,
        parent,
        tokens,
        record.begin,
        landmark,
        deltas,
        None if checkpoint is None else tuple(tuple(part is not None for part in layer) for layer in checkpoint),
        tuple(TensorShape(_NAMES[array.dtype], tuple(array.shape)) for array in record.arrays()),
    )


def packed(record: Record) -> list[bytes]:
    return [_raw(array) for array in record.arrays()]


def unpacked(piece: ArchivedRecord, data: Sequence[bytes]) -> Record:
    arrays = iter([_array(tensor, raw) for tensor, raw in zip(piece.tensors, data, strict=True)])
    deltas = tuple(
        None if delta is None else KVDelta(delta[0], delta[1], tuple(next(arrays) for _ in range(delta[2])))
        for delta in piece.deltas
    )
    return Record(piece.begin, piece.end, deltas, _checkpoint(piece, arrays))


def _checkpoint(piece: ArchivedRecord, arrays: Iterator[mx.array]) -> Checkpoint | None:
    if piece.checkpoint is None:
        return None
    return tuple(tuple(next(arrays) if there else None for there in layer) for layer in piece.checkpoint)


@dataclass(frozen=True, slots=True)
class Form:
    """What this model's records look like: one of them, and the layers that keep only a window."""

    sample: Record
    windowed: frozenset[int]


def check_fits(record: Record, form: Form) -> None:
    """Raises ArchiveError unless the record holds what one of this model's does: a wrong shape would otherwise only be
    found in the middle of a step that others share, and a gap would show what the slot held before."""
    if not _fits(record, form):
        raise ArchiveError("The file holds other states than this model's.")


def _fits(record: Record, form: Form) -> bool:
    sample = form.sample
    if len(record.deltas) != len(sample.deltas):
        return False
    for layer, (mine, theirs) in enumerate(zip(record.deltas, sample.deltas, strict=True)):
        if mine is None or theirs is None:
            if mine is not theirs:
                return False
        elif not (_in_place(mine, record, windowed=layer in form.windowed) and _same_shapes(mine, theirs)):
            return False
    if record.checkpoint is None or sample.checkpoint is None:
        return record.checkpoint is None
    return len(record.checkpoint) == len(sample.checkpoint) and all(
        _same_parts(mine, theirs) for mine, theirs in zip(record.checkpoint, sample.checkpoint, strict=True)
    )


def _in_place(delta: KVDelta, record: Record, *, windowed: bool) -> bool:
    """Whether it covers its record, as an append layer's must; a window layer's may begin later, or hold nothing and
    say so by beginning behind the record."""
    if not windowed:
        return (delta.begin, delta.end) == (record.begin, record.end) and bool(delta.arrays)
    if not delta.arrays:
        return record.end <= delta.begin == delta.end
    return 0 <= delta.begin < delta.end == record.end


def _same_shapes(mine: KVDelta, theirs: KVDelta) -> bool:
    if not mine.arrays:
        return True
    if len(mine.arrays) != len(theirs.arrays):
        return False
    for array, known in zip(mine.arrays, theirs.arrays, strict=True):
        expected = (*known.shape[:2], mine.end - mine.begin, *known.shape[3:])
        if tuple(array.shape) != expected or array.dtype != known.dtype:
            return False
    return True


def _same_parts(mine: tuple[mx.array | None, ...], theirs: tuple[mx.array | None, ...]) -> bool:
    if len(mine) != len(theirs):
        return False
    for part, known in zip(mine, theirs, strict=True):
        if part is None or known is None:
            if part is not known:
                return False
            continue
        # The second axis of a history of the newest tokens is as long as its sequence at first.
        rest = (part.shape[:1], part.shape[2:]) == (known.shape[:1], known.shape[2:])
        if part.dtype != known.dtype or part.ndim != known.ndim or not rest:
            return False
        if part.ndim > 1 and part.shape[1] > known.shape[1]:
            return False
    return True


def _raw(array: mx.array) -> bytes:
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.asarray(plain).tobytes()


def _array(tensor: TensorShape, raw: bytes) -> mx.array:
    plain = mx.array(np.frombuffer(raw, _BYTES[tensor.dtype]).reshape(tensor.shape))
    return plain.view(mx.bfloat16) if tensor.dtype == "BF16" else plain.astype(_DTYPES[tensor.dtype])
