"""Layers of a tower in slices: a few rows of patches at a time, so that neither scores nor time grow beyond bounds.

Patches attend within segments (a picture, a pair of frames, a window) and never beyond. Segments of one size are one
table of row numbers, [segments, rows].
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.kernels.device import Device

Segments = Sequence[NDArray[np.int32]]
Work = Generator[Sequence[mx.array], None, mx.array]

SCORE_BYTES = 64 << 20
"""What scores of one slice may take where attention is not fused."""
ROWS = {"cpu": 512, "cuda": 8192, "metal": 4096}
"""Rows of a slice, at most."""
CPU_WORK = 1 << 27
"""Rows of a slice by the square of their width, where a processor computes them: some hundredths of a second."""
FEWEST_ROWS = 32
"""Slices are so many rows, or a multiple: what merges neighbouring patches takes several at once."""
FUSED_SIZES = (64, 80, 128)
"""Sizes of heads that GPUs attend with in one kernel."""


@dataclass(frozen=True, slots=True)
class Slicing:
    rows: int
    unfused: bool

    @classmethod
    def on(cls, device: Device, width: int) -> Slicing:
        """For a tower whose rows are so wide."""
        rows = ROWS[device.kind]
        if device.kind == "cpu":
            rows = min(rows, max(1, CPU_WORK // (FEWEST_ROWS * width**2)) * FEWEST_ROWS)
        return cls(rows, device.unfused_attention)

    def queries(self, heads: int, keys: int) -> int:
        """Rows whose attention is computed at once, to so many keys."""
        if not self.unfused:
            return self.rows
        return max(16, min(self.rows, SCORE_BYTES // (8 * heads * keys)))


def by_rows(work: Callable[[mx.array], mx.array], x: mx.array, rows: int) -> Work:
    """What treats rows one by one, a slice of them at a time."""
    done = []
    for begin in range(0, x.shape[0], rows):
        done.append(work(x[begin : begin + rows]))
        yield done[-1:]
    return done[0] if len(done) == 1 else mx.concatenate(done)


def attended(
    turned: tuple[mx.array, mx.array, mx.array],
    segments: Segments,
    behind: Callable[[mx.array, mx.array], mx.array],
    slicing: Slicing,
) -> Work:
    """Queries, keys and values [rows, heads, size] attend within segments; `behind(rows, found)` computes what a layer
    makes of it for some of its rows, and the results come back in the rows' order."""
    queries, keys, values = turned
    heads, size = queries.shape[1:]
    done: list[mx.array] = []
    order: list[NDArray[np.int32]] = []
    for table in segments:
        most, before = slicing.queries(heads, table.shape[1]), None
        for chosen, rows in _tiles(table, most):
            own = table[chosen]
            if chosen != before:  # tiles of one long segment see the same
                before, seen = chosen, (keys[mx.array(own)], values[mx.array(own)])
            asked = own if rows is None else own[:, rows]
            found = _attend(queries[mx.array(asked)], *seen, slicing)
            numbers = asked.reshape(-1)
            done.append(behind(mx.array(numbers), found.reshape(numbers.size, heads * size)))
            order.append(numbers)
            yield done[-1:]
    back = np.argsort(np.concatenate(order), kind="stable").astype(np.int32)
    joined = done[0] if len(done) == 1 else mx.concatenate(done)
    return joined if np.array_equal(back, np.arange(back.size)) else joined[mx.array(back)]


def _tiles(table: NDArray[np.int32], most: int) -> list[tuple[slice, slice | None]]:
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
    wanted = size if slicing.unfused else next((known for known in FUSED_SIZES if size <= known), size)
    padding = [(0, 0), (0, 0), (0, 0), (0, wanted - size)]
    parts = [part if wanted == size else mx.pad(part, padding) for part in (queries, keys, values)]
    found = mx.fast.scaled_dot_product_attention(*(part.swapaxes(1, 2) for part in parts), scale=size**-0.5, mask=None)
    return found.swapaxes(1, 2)[..., :size]


def turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """x [rows, heads, size], whose halves turn by angles [rows, 1, size / 2]."""
    one, two = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1).astype(x.dtype)


def weight_dtype(module: Any) -> mx.Dtype:
    """What a layer computes in: kernels of ours take what is widened as it is multiplied as float32."""
    from ingot.models.layers.modules import DenseLinear, PackedLinear

    if isinstance(module, DenseLinear | PackedLinear):
        return mx.float32
    dtype: mx.Dtype = module.weight.dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else module.scales.dtype
