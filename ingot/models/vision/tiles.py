"""Vision towers over tiles of an image, all of one size and encoded separately: one tile, or several and the whole
image scaled down.

A family defines how tiles are cut and how their states become features. Frames are normalised and resized as the
families' own processors do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.media.image_processors import ConfigObject
from ingot.media.images import BICUBIC, Pixels, View
from ingot.media.items import MediaItem
from ingot.media.layout import Layout, Size
from ingot.models.vision.tower import EncodingBytes, EncodingSlices, PixelArray, VisionFeatures
from ingot.models.vision.vit import RowFunction, Vit, VitRotation, run_by_rows

MakeViews = Callable[[Size, Layout], Sequence[View]]
"""How a worker resizes an image of this size, in this layout."""
CutTiles = Callable[[Sequence[Pixels], Layout], Iterable[PixelArray]]
"""An image's normalised tiles [height, width, 3], from its views."""
GatherStates = Callable[[mx.array, Layout], mx.array]
"""From states [tiles, rows, width] to a projector's input [tiles, features, numbers]."""
TileRotation = Callable[[Layout], VitRotation]
"""The rotation of a tile's patches, where their positions are rotary."""

T = TypeVar("T", bound=np.generic)
_HALF: Final = (0.5, 0.5, 0.5)
_SHARPNESS: Final = -0.75
TILE_PATCHES_TOGETHER = 4096
"""Patches of tiles that are encoded together, unless one tile has more."""


def single_view(size: Size, layout: Layout) -> Sequence[View]:
    """For families that encode an image as one tile."""
    return ((layout.size,),)


def cut_square_tiles(frame: NDArray[T], side: int) -> Iterator[NDArray[T]]:
    """Of an image whose sides are multiples of `side`, row by row."""
    for top in range(0, frame.shape[0], side):
        for left in range(0, frame.shape[1], side):
            yield frame[top : top + side, left : left + side]


def on_canvas(frame: Pixels, canvas: Size, colour: int) -> Pixels:
    """Centres the frame on a canvas."""
    height, width, _ = frame.shape
    filled = np.full((canvas.height, canvas.width, 3), colour, dtype=np.uint8)
    top, left = (canvas.height - height) // 2, (canvas.width - width) // 2
    filled[top : top + height, left : left + width] = frame
    return filled


@dataclass(frozen=True, slots=True)
class PixelNormalization:
    """(value * scale - mean) / deviation, in each channel."""

    scale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    resample: int = BICUBIC

    @classmethod
    def stated(
        cls,
        stated: ConfigObject,
        mean: Sequence[float] = _HALF,
        deviation: Sequence[float] = _HALF,
        resample: int = BICUBIC,
    ) -> PixelNormalization:
        """As a preprocessor's config states, or else the defaults of its family's class."""
        scale = float(stated.get("rescale_factor") or 1 / 255) if stated.get("do_rescale", True) else 1.0
        if not stated.get("do_normalize", True):
            return cls(scale, (0.0,) * 3, (1.0,) * 3, resample)
        return cls(
            scale,
            tuple(map(float, stated.get("image_mean") or mean)),
            tuple(map(float, stated.get("image_std") or deviation)),
            int(stated.get("resample") or resample),
        )

    def __call__(self, frame: Pixels) -> NDArray[np.float32]:
        """[height, width, 3]"""
        mean, deviation = (np.array(each, dtype=np.float32) for each in (self.mean, self.deviation))
        scaled = frame.astype(np.float32) * np.float32(self.scale)
        normal: NDArray[np.float32] = (scaled - mean) / deviation
        return normal


@dataclass(frozen=True, slots=True)
class TiledVisionTower:
    vit: Vit
    modules: Sequence[Any]
    patch: int
    hidden: int  # size of a feature
    normal: PixelNormalization
    gather: GatherStates
    project: RowFunction
    views: MakeViews = single_view
    cut: CutTiles | None = None  # None: the one view is the one tile
    arrange: GatherStates | None = None  # selects and orders the rows of all tiles to project, where not all in order
    rotation: TileRotation | None = None
    finish: GatherStates | None = None  # from projected rows to features, where those differ
    bidirectional: bool = False
    stand_in: int | None = None
    deep: int = 0
    axes: None = None

    def positions(self, length: int, items: Sequence[MediaItem]) -> None:
        return None

    def pixels(self, item: MediaItem) -> PixelArray:
        """[tiles, patches, patch * patch * 3]"""
        views = self.views(item.source.size, item.layout)
        frames = list(item.source.frames(*views, resample=self.normal.resample))
        assert len(frames) == len(views), "an image is one frame"
        tiles = [self.normal(frames[0])] if self.cut is None else self.cut(frames, item.layout)
        return np.stack([self._patches(tile, item.layout) for tile in tiles])

    def _patches(self, tile: PixelArray, layout: Layout) -> PixelArray:
        _, rows, columns = layout.grid
        patch = self.patch
        tile = tile[: rows * patch, : columns * patch]  # what does not fill a patch is left out
        blocks = tile.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
        return blocks.reshape(rows * columns, patch * patch * 3)

    def encode(self, pixels: PixelArray, layout: Layout) -> EncodingSlices:
        tiles, patches, _ = pixels.shape
        together = max(1, TILE_PATCHES_TOGETHER // patches)
        angles = None if self.rotation is None else self.rotation(layout)
        gathered = []
        for begin in range(0, tiles, together):
            states = yield from self.vit.states(mx.array(pixels[begin : begin + together]), angles)
            gathered.append(self.gather(states, layout))
            yield gathered[-1:]
        joined = mx.concatenate(gathered)
        arranged = joined if self.arrange is None else self.arrange(joined, layout)
        rows = arranged.reshape(-1, joined.shape[-1])
        each = rows.shape[1] * self.hidden + self.hidden**2  # a projector is one matrix, or two
        embeddings = yield from run_by_rows(self.project, self.vit.slicing.rows(each), rows)
        embeddings = embeddings if self.finish is None else self.finish(embeddings, layout)
        assert embeddings.shape[0] == layout.features, "a layout says how many features there are"
        return VisionFeatures(embeddings)

    def needs(self, layout: Layout) -> EncodingBytes:
        grid, vit = layout.grid, self.vit
        tile = grid.h * grid.w + (vit.first is not None)
        seen = min(grid.t * tile, max(tile, TILE_PATCHES_TOGETHER))
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
        return EncodingBytes(
            pixels=4 * grid.t * grid.h * grid.w * numbers, work=4 * work, features=4 * layout.features * self.hidden
        )


def resize_bicubic(frame: PixelArray, size: Size) -> PixelArray:
    """Resizes [height, width, channels] from four by four neighbours, without antialiasing, as torch's interpolate
    does."""
    for axis, length in ((0, size.height), (1, size.width)):
        frame = _resize_axis(frame, axis, length)
    return frame


def _resize_axis(frame: PixelArray, axis: int, length: int) -> PixelArray:
    old = frame.shape[axis]
    at = (np.arange(length, dtype=np.float64) + 0.5) * (old / length) - 0.5
    first = np.floor(at).astype(np.int64)
    beyond = at - first
    shape = [1] * frame.ndim
    shape[axis] = length
    resized = np.zeros([length if each == axis else count for each, count in enumerate(frame.shape)], dtype=np.float64)
    for step in range(-1, 3):
        indices = np.clip(first + step, 0, old - 1)
        resized += np.take(frame, indices, axis=axis) * _bicubic_weight(np.abs(beyond - step)).reshape(shape)
    return resized.astype(np.float32)


def _bicubic_weight(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of a neighbour at this distance."""
    a = _SHARPNESS
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, far)
