"""Joining arrays, and resizing and copying those whose first axis is slots."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def concatenate(parts: Sequence[mx.array], axis: int = 0) -> mx.array:
    """The parts one after another; a single one as it is, which `mx.concatenate` would copy."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=axis)


def resize_rows(array: mx.array, rows: int) -> mx.array:
    if rows <= array.shape[0]:
        return copy_array(array[:rows])
    return mx.concatenate([array, mx.zeros((rows - array.shape[0], *array.shape[1:]), array.dtype)])


def pad_to_length(array: mx.array, other: mx.array) -> mx.array:
    """`array` with zeros in front, so that its second axis is at least as long as that of `other`."""
    missing = other.shape[1] - array.shape[1] if other.ndim > 1 else 0
    if missing <= 0:
        return array
    return mx.concatenate([mx.zeros((array.shape[0], missing, *array.shape[2:]), array.dtype), array], axis=1)


def copy_array(array: mx.array) -> mx.array:
    """A copy in memory of its own. `mx.contiguous`, a full slice and an assignment of a whole array may share memory
    with the original, as may a concatenation of one piece; so it is concatenated from two. Gathering is slow on
    CPUs."""
    if not array.size:
        return mx.zeros(array.shape, array.dtype)
    axis = next((axis for axis in _axes_by_preference(array.ndim) if array.shape[axis] > 1), None)
    if axis is None:
        return mx.take(array, mx.array([0]), axis=0)
    return mx.concatenate(list(mx.split(array, [array.shape[axis] // 2], axis=axis)), axis=axis)


def _axes_by_preference(axes: int) -> list[int]:
    """The axes to split along: tokens first, as that gives long pieces."""
    return [axis for axis in (axes - 2, axes - 1) if axis >= 0] + list(range(axes - 2))
