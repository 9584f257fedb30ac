"""Towers that look at tiles of a picture, all of one size, each for itself: a picture's one tile, or several and the
whole picture small. A family says how tiles are cut and what becomes of their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.media.items import MediaItem
from ingot.media.layout import Layout
from ingot.media.picture import Pixels, View
from ingot.media.size import Size
from ingot.models.vision.slicing import by_rows
from ingot.models.vision.tower import Features, LookBytes, PixelArray, Slices
from ingot.models.vision.vit import Angles, RowWork, Vit

Views = Callable[[Size, Layout], Sequence[View]]
"""What a worker makes of a picture of this size, in this layout."""
Cut = Callable[[Sequence[Pixels], Layout], Iterable[PixelArray]]
"""A picture's tiles [height, width, 3], normalised, out of its views."""
Gather = Callable[[mx.array, Layout], mx.array]
"""Of states [tiles, rows, width] what a projector takes, [tiles, features, numbers]."""
Turn = Callable[[Layout], Angles]
"""By how much the patches of a tile turn, where their positions are rotary."""

T = TypeVar("T", bound=np.generic)
TOGETHER = 4096
"""Patches of tiles that are looked at together, unless one tile has more."""


def one_view(size: Size, layout: Layout) -> Sequence[View]:
    """Of families that look at a picture as one tile."""
    return ((layout.size,),)


def tiles(frame: NDArray[T], side: int) -> Iterator[NDArray[T]]:
    """Of a picture that squares of this side fill, line by line."""
    for top in range(0, frame.shape[0], side):
        for left in range(0, frame.shape[1], side):
            yield frame[top : top + side, left : left + side]


@dataclass(frozen=True, slots=True)
class TiledTower:
    vit: Vit
    modules: Sequence[Any]
    patch: int
    hidden: int  # numbers of a feature
    views: Views
    cut: Cut
    resample: int  # how views are made
    gather: Gather
    project: RowWork
    arrange: Gather | None = None  # of all tiles' the rows that are projected, where those are not all in their order
    turn: Turn | None = None
    finish: Gather | None = None  # of what was projected the features, where there are others among them
    mutual: bool = False
    deep: int = 0
    axes: None = None

    def positions(self, length: int, items: Sequence[MediaItem]) -> None:
        return None

    def pixels(self, item: MediaItem) -> PixelArray:
        """[tiles, patches, patch * patch * 3]"""
        views = self.views(item.source.size, item.layout)
        shown = list(item.source.frames(*views, resample=self.resample))
        assert len(shown) == len(views), "a picture is one frame"
        return np.stack([self._patches(tile, item.layout) for tile in self.cut(shown, item.layout)])

    def _patches(self, tile: PixelArray, layout: Layout) -> PixelArray:
        _, rows, columns = layout.grid
        patch = self.patch
        tile = tile[: rows * patch, : columns * patch]  # what is left of a tile beside whole patches is not seen
        blocks = tile.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
        return blocks.reshape(rows * columns, patch * patch * 3)

    def look(self, pixels: PixelArray, layout: Layout) -> Slices:
        tiles, patches, _ = pixels.shape
        together = max(1, TOGETHER // patches)
        angles = None if self.turn is None else self.turn(layout)
        gathered = []
        for begin in range(0, tiles, together):
            states = yield from self.vit.states(mx.array(pixels[begin : begin + together]), angles)
            gathered.append(self.gather(states, layout))
            yield gathered[-1:]
        joined = mx.concatenate(gathered)
        arranged = joined if self.arrange is None else self.arrange(joined, layout)
        rows = arranged.reshape(-1, joined.shape[-1])
        each = rows.shape[1] * self.hidden + self.hidden**2  # a projector is one matrix, or two
        embeddings = yield from by_rows(self.project, self.vit.slicing.rows(each), rows)
        embeddings = embeddings if self.finish is None else self.finish(embeddings, layout)
        assert embeddings.shape[0] == layout.features, "a layout says how many features there are"
        return Features(embeddings)

    def needs(self, layout: Layout) -> LookBytes:
        grid, vit = layout.grid, self.vit
        tile = grid.h * grid.w + (vit.first is not None)
        seen = min(grid.t * tile, max(tile, TOGETHER))
        numbers = 3 * self.patch**2
        rows = min(vit.slicing.most, seen)
        queries = vit.slicing.queries(vit.heads, vit.width // vit.heads, tile)
        scores = 2 * vit.heads * queries * tile if vit.slicing.unfused else 0
        kept = grid.t * tile * vit.width  # states that projectors wait for
        work = (
            seen * (numbers + 12 * vit.width)
            + 2 * kept
            + 16 * rows * vit.width
            + scores
            + (layout.features if self.finish is None else 3 * grid.t * tile) * self.hidden
        )
        return LookBytes(
            pixels=4 * grid.t * grid.h * grid.w * numbers, work=4 * work, features=4 * layout.features * self.hidden
        )
