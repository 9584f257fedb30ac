"""A tower's work in slices: whoever waits for his next token waits for no more than one of them.

A slice is as much arithmetic as takes some hundredths of a second, whatever the tower and whatever it looks at. How it
is cut follows from shapes alone, so that what is seen depends on nobody beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from ingot.kernels import native
from ingot.kernels.device import Device, DeviceKind

Work = Generator[Sequence[mx.array], None, mx.array]

WORK: Final[dict[DeviceKind, int]] = {"cpu": 1 << 30, "cuda": 1 << 38, "metal": 1 << 35}
"""Multiplications of a slice, at most, unless its fewest rows take more."""
ROWS: Final[dict[DeviceKind, int]] = {"cpu": 512, "cuda": 8192, "metal": 4096}
"""Rows of a slice, at most."""
FEWEST_ROWS: Final = 16
"""Slices are so many rows, or a multiple: what merges neighbouring patches takes several at once."""
SCORE_BYTES: Final = 64 << 20
"""What scores of one slice may take where attention is not fused."""


@dataclass(frozen=True, slots=True)
class Slicing:
    most: int  # rows of a slice
    work: int  # multiplications of one
    native: bool  # whether a kernel of ours attends
    unfused: bool  # whether scores of a slice exist in memory at once

    @classmethod
    def on(cls, device: Device) -> Slicing:
        ours = device.kind == "cpu" and native.attends_segments()
        return cls(ROWS[device.kind], WORK[device.kind], ours, device.unfused_attention and not ours)

    def rows(self, each: int) -> int:
        """Rows of a slice, of which each takes so many multiplications."""
        return min(self.most, max(1, self.work // (FEWEST_ROWS * max(1, each))) * FEWEST_ROWS)

    def queries(self, heads: int, size: int, keys: int, behind: int = 0) -> int:
        """Rows of a slice that attend to so many keys, with `behind` multiplications of each afterwards."""
        rows = self.rows(2 * heads * size * keys + behind)
        return rows if not self.unfused else max(FEWEST_ROWS, min(rows, SCORE_BYTES // (8 * heads * keys)))


def by_rows(work: Callable[..., mx.array], rows: int, *arrays: mx.array) -> Work:
    """What treats rows one by one, so many at a time, each with its own of all arrays."""
    done = []
    for begin in range(0, arrays[0].shape[0], rows):
        done.append(work(*(array[begin : begin + rows] for array in arrays)))
        yield done[-1:]
    return (yield from joined(done))


def joined(parts: Sequence[mx.array]) -> Work:
    """One behind another, which is a slice of its own: a picture's states are many bytes."""
    if len(parts) == 1:
        return parts[0]
    whole = mx.concatenate(list(parts))
    yield [whole]
    return whole


def multiplications(*modules: Any) -> int:
    """Of one row, by all matrices of some modules."""
    layers = (layer for module in modules for _, layer in module.named_modules())
    return sum(math.prod(_shape(layer)) for layer in layers if "weight" in layer and layer.weight.ndim == 2)


def _shape(layer: Any) -> tuple[int, ...]:
    if "scales" not in layer:
        shape: tuple[int, ...] = layer.weight.shape
        return shape
    return layer.weight.size * layer.weight.dtype.size * 8 // layer.bits, 1
