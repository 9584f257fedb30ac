"""Arrays whose first axis is slots: made, made longer, and copied."""

from __future__ import annotations

import mlx.core as mx


def empty_like(part: mx.array, slots: int, capacity: int, dtype: mx.Dtype | None = None) -> mx.array:
    return mx.zeros((slots, part.shape[1], capacity, part.shape[3]), dtype or part.dtype)


def with_rows(array: mx.array, rows: int) -> mx.array:
    if rows <= array.shape[0]:
        return copied(array[:rows])
    return mx.concatenate([array, mx.zeros((rows - array.shape[0], *array.shape[1:]), array.dtype)])


def as_long(array: mx.array, other: mx.array) -> mx.array:
    """`array` with zeros in front, so that its second axis is as long as `other`'s if that is longer."""
    missing = other.shape[1] - array.shape[1] if other.ndim > 1 else 0
    if missing <= 0:
        return array
    return mx.concatenate([mx.zeros((array.shape[0], missing, *array.shape[2:]), array.dtype), array], axis=1)


def copied(array: mx.array) -> mx.array:
    """In memory of its own, whatever it is a view of: `mx.contiguous`, a slice and an assignment that covers an array
    whole may all share it. In two pieces, as one would be handed on as it is; gathering would copy it, but takes long
    on CPUs."""
    if not array.size:
        return mx.zeros(array.shape, array.dtype)
    axis = next((axis for axis in _by_preference(array.ndim) if array.shape[axis] > 1), None)
    if axis is None:
        return mx.take(array, mx.array([0]), axis=0)
    return mx.concatenate(list(mx.split(array, [array.shape[axis] // 2], axis=axis)), axis=axis)


def _by_preference(axes: int) -> list[int]:
    """The axes to cut along: tokens first, as their pieces are long."""
    return [axis for axis in (axes - 2, axes - 1) if axis >= 0] + list(range(axes - 2))


def assign(array: mx.array, slot: int, begin: int, tokens: mx.array) -> None:
    """Write tokens [1, heads, count, size] into a row. `array` is never left sharing their memory."""
    own = copied(tokens) if tokens.size == array.size else tokens
    array[slot : slot + 1, :, begin : begin + tokens.shape[2]] = own


def blank(array: mx.array, slot: int, count: int) -> None:
    """Write zeros over the first `count` tokens of a row."""
    row = array[slot : slot + 1, :, :count]
    # One zero for all of them is enough to write, but not to be the array, which must lie in one piece.
    zeros = mx.zeros(row.shape if row.size == array.size else (), array.dtype)
    array[slot : slot + 1, :, :count] = zeros


def resized(array: mx.array, slots: int, capacity: int) -> mx.array:
    kept = array[:slots, :, :capacity]
    shape = (slots, array.shape[1], capacity, array.shape[3])
    if kept.shape == shape:
        return copied(kept)  # a view of it would keep all of the old memory
    fresh = mx.zeros(shape, array.dtype)
    fresh[: kept.shape[0], :, : kept.shape[2]] = kept
    return fresh
