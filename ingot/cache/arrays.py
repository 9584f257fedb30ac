"""Arrays whose first axis is slots: made, made longer, and copied."""

from __future__ import annotations

import mlx.core as mx


def empty_like(part: mx.array, slots: int, capacity: int, dtype: mx.Dtype | None = None) -> mx.array:
    return mx.zeros((slots, part.shape[1], capacity, part.shape[3]), dtype or part.dtype)


def with_rows(array: mx.array, rows: int) -> mx.array:
    if rows <= array.shape[0]:
        return mx.contiguous(array[:rows])
    return mx.concatenate([array, mx.zeros((rows - array.shape[0], *array.shape[1:]), array.dtype)])


def as_long(array: mx.array, other: mx.array) -> mx.array:
    """`array` with zeros in front, so that its second axis is as long as `other`'s if that is longer."""
    missing = other.shape[1] - array.shape[1] if other.ndim > 1 else 0
    if missing <= 0:
        return array
    return mx.concatenate([mx.zeros((array.shape[0], missing, *array.shape[2:]), array.dtype), array], axis=1)


def copied(row: mx.array) -> mx.array:
    """In memory of its own. In two pieces, as what is one already would not be copied; gathering would copy it, but
    takes long on CPUs."""
    axis = row.ndim - (2 if row.shape[-2] > 1 else 1)
    half = row.shape[axis] // 2
    if not half:
        return mx.take(row, mx.array([0]), axis=0)
    return mx.concatenate(list(mx.split(row, [half], axis=axis)), axis=axis)


def resized(array: mx.array, slots: int, capacity: int) -> mx.array:
    kept_slots, kept = min(slots, array.shape[0]), min(capacity, array.shape[2])
    fresh = mx.zeros((slots, array.shape[1], capacity, array.shape[3]), array.dtype)
    fresh[:kept_slots, :, :kept] = array[:kept_slots, :, :kept]
    return fresh
