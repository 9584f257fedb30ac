"""Arrays whose first axis is slots: made longer, and copied."""

from __future__ import annotations

import mlx.core as mx


def resize_rows(array: mx.array, rows: int) -> mx.array:
    if rows <= array.shape[0]:
        return copy_array(array[:rows])
    return mx.concatenate([array, mx.zeros((rows - array.shape[0], *array.shape[1:]), array.dtype)])


def pad_to_length(array: mx.array, other: mx.array) -> mx.array:
    """`array` with zeros in front, so that its second axis is as long as `other`'s if that is longer."""
    missing = other.shape[1] - array.shape[1] if other.ndim > 1 else 0
    if missing <= 0:
        return array
    return mx.concatenate([mx.zeros((array.shape[0], missing, *array.shape[2:]), array.dtype), array], axis=1)


def copy_array(array: mx.array) -> mx.array:
    """In memory of its own, whatever it is a view of: `mx.contiguous`, a slice and an assignment that covers an array
    whole may all share it. In two pieces, as one would be handed on as it is; gathering would copy it, but takes long
    on CPUs."""
    if not array.size:
        return mx.zeros(array.shape, array.dtype)
    axis = next((axis for axis in _axes_by_preference(array.ndim) if array.shape[axis] > 1), None)
    if axis is None:
        return mx.take(array, mx.array([0]), axis=0)
    return mx.concatenate(list(mx.split(array, [array.shape[axis] // 2], axis=axis)), axis=axis)


def _axes_by_preference(axes: int) -> list[int]:
    """The axes to cut along: tokens first, as their pieces are long."""
    return [axis for axis in (axes - 2, axes - 1) if axis >= 0] + list(range(axes - 2))
