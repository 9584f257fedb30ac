"""Where tokens stand for RoPE of three axes: time, row and column. One walk over the runs of a prompt's media."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ingot.media.items import MediaItem, Span
from ingot.media.layout import Grid
from ingot.models.vision.tower import PositionArray

Block = tuple[Span, Grid, float]
"""A run of tokens, what it shows, and by how much time advances with each step of it."""


def three_axes(length: int, items: Sequence[MediaItem], merge: int, pace: float | None = None) -> PositionArray:
    """Text advances all axes together; what is seen begins where the text before it ended and spans its rows and
    columns, and text goes on behind the longer side.

    `merge` patches by `merge` make a token. Time advances by one with each step of a clip, or by `pace` a second.
    Raises ValueError where a run is not as long as its grid says.
    """
    found = np.empty((3, length), dtype=np.int32)
    at = place = 0
    for (begin, end), grid, step in (block for item in items for block in _blocks(item, pace)):
        found[:, at:begin] = np.arange(place, place + begin - at)
        place += begin - at
        rows, columns = grid.h // merge, grid.w // merge
        if end - begin != grid.t * rows * columns:
            raise ValueError(f"a run of {end - begin} tokens does not show a grid of {grid}")
        times = (np.arange(grid.t, dtype=np.float32) * np.float32(step)).astype(np.int64)
        axes = np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")
        found[:, begin:end] = place + np.stack(axes).reshape(3, -1)
        place += max(rows, columns)
        at = end
    found[:, at:] = np.arange(place, place + length - at)
    return found


def _blocks(item: MediaItem, pace: float | None) -> Iterator[Block]:
    grid = item.grid
    if len(item.runs) == grid.t:  # a run for each step
        yield from ((run, Grid(1, grid.h, grid.w), 1.0) for run in item.runs)
        return
    (run,) = item.runs
    yield run, grid, 1.0 if pace is None or item.kind == "image" else pace * item.layout.interval


def interleaved(sections: Sequence[int]) -> tuple[int, ...]:
    """Axes by turns, each as often as its section says, and what is left to the first (Qwen 3 VL and 3.5)."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for number in range(axis, 3 * sections[axis], 3):
            axes[number] = axis
    return tuple(axes)


def contiguous(sections: Sequence[int]) -> tuple[int, ...]:
    """One axis after another (Qwen 2 and 2.5 VL)."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
