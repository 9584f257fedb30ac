"""Attention of a tower's layers: patches see those of their segment (a picture, a pair of frames, a window), no others.

Segments of one size are one table of row numbers, [segments, rows].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.kernels import native
from ingot.models.vision.slicing import Slicing, Work, joined

RowNumbers = NDArray[np.int32]
Segments = Sequence[RowNumbers]

FUSED_SIZES = (64, 80, 128)
"""Sizes of heads that GPUs attend with in one kernel."""


def attended(
    heads: mx.array,
    segments: Segments,
    behind: Callable[[RowNumbers, mx.array], mx.array],
    each: int,
    slicing: Slicing,
) -> Work:
    """Queries, keys and values [rows, 3, heads, size] attend within segments; `behind(rows, found)` computes what a
    layer makes of it for some of its rows, in `each` multiplications a row. The results come in the rows' order."""
    count, size = heads.shape[2:]
    done: list[mx.array] = []
    order: list[RowNumbers] = []
    for table in segments:
        most, before = slicing.queries(count, size, table.shape[1], each), None
        for chosen, rows in _tiles(table, most):
            own = table[chosen]
            if chosen != before:  # tiles of one long segment see the same
                before, seen = chosen, (taken(heads[:, 1], own), taken(heads[:, 2], own))
            asked = own if rows is None else own[:, rows]
            found = _attend(taken(heads[:, 0], asked), *seen, slicing)
            numbers = asked.reshape(-1)
            done.append(behind(numbers, found.reshape(numbers.size, count * size)))
            order.append(numbers)
            yield done[-1:]
    whole = yield from joined(done)
    back = np.argsort(np.concatenate(order), kind="stable").astype(np.int32)
    return whole if np.array_equal(back, np.arange(back.size)) else whole[mx.array(back)]


def taken(x: mx.array, numbers: RowNumbers) -> mx.array:
    """Rows of these numbers, in their shape: not copied where they lie one behind another."""
    flat = numbers.reshape(-1)
    begin, end = int(flat[0]), int(flat[-1]) + 1
    if end - begin == flat.size and np.array_equal(flat, np.arange(begin, end)):
        return x[begin:end].reshape(*numbers.shape, *x.shape[1:])
    return x[mx.array(numbers)]


def _tiles(table: RowNumbers, most: int) -> list[tuple[slice, slice | None]]:
    """Which segments of a table attend at once; or which rows of one of them, where it is long."""
    count, rows = table.shape
    if rows <= most:
        together = max(1, most // rows)
        return [(slice(begin, begin + together), None) for begin in range(0, count, together)]
    return [
        (slice(number, number + 1), slice(begin, begin + most))
        for number in range(count)
        for begin in range(0, rows, most)
    ]


def _attend(queries: mx.array, keys: mx.array, values: mx.array, slicing: Slicing) -> mx.array:
    """[segments, rows, heads, size] each, to all keys of the same segment."""
    size = queries.shape[-1]
    if slicing.native:
        return native.attend_segments(queries, keys, values, size**-0.5).astype(queries.dtype)
    wanted = size if slicing.unfused else next((known for known in FUSED_SIZES if size <= known), size)
    padding = [(0, 0), (0, 0), (0, 0), (0, wanted - size)]
    parts = [part if wanted == size else mx.pad(part, padding) for part in (queries, keys, values)]
    found = mx.fast.scaled_dot_product_attention(*(part.swapaxes(1, 2) for part in parts), scale=size**-0.5, mask=None)
    return found.swapaxes(1, 2)[..., :size]


def turned(heads: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Queries, keys and values [rows, 3, heads, size], of which the first two turn, each half by angles
    [rows, 1, size / 2]."""
    cos, sin = cos[:, None], sin[:, None]
    one, two = mx.split(heads[:, :2].astype(mx.float32), 2, axis=-1)
    both = mx.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)
    return mx.concatenate([both.astype(heads.dtype), heads[:, 2:]], axis=1)


def weight_dtype(module: Any) -> mx.Dtype:
    """What a layer computes in: kernels of ours take what is widened as it is multiplied as float32."""
    from ingot.models.layers.modules import DenseLinear, PackedLinear

    if isinstance(module, DenseLinear | PackedLinear):
        return mx.float32
    dtype: mx.Dtype = module.weight.dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else module.scales.dtype
