"""Vision towers over tiles of an image, all of one size and encoded separately: one tile, or several and the whole
image scaled down.

A family defines how tiles are cut and how their states become features. Frames are normalised and resized as the
families' own processors do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.media.images import BICUBIC, Pixels, View
from ingot.media.items import MediaItem
from ingot.media.layout import Grid, Layout, Size
from ingot.media.processor_parts import ConfigObject
from ingot.models.vision.tower import EncodingBytes, EncodingSlices, PixelArray, PositionArray, VisionFeatures
from ingot.models.vision.vit import TILE_PATCHES_TOGETHER, Encoder, RowFunction, VitRotation, run_by_rows

MakeViews = Callable[[Size, Layout], Sequence[View]]
"""How a worker resizes an image of this size, in this layout."""
CutTiles = Callable[[Sequence[Pixels], Layout], Iterable[PixelArray]]
"""An image's normalised tiles [height, width, 3], from its views."""
GatherStates = Callable[[mx.array, Grid], mx.array]
"""From states [tiles, rows, width] of a grid to a projector's input [tiles, features, numbers]."""
ArrangeRows = Callable[[mx.array, Layout], mx.array]
"""From the rows [features, numbers] of all tiles to those of an image."""
TileRotation = Callable[[Grid], VitRotation]
"""The rotation of a tile's patches, where their positions are rotary."""
LocateTokens = Callable[[int, Sequence[MediaItem]], PositionArray]
"""See `VisionTower.positions`."""

WeighNeighbour = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""The weight of a neighbour at this distance."""

T = TypeVar("T", bound=np.generic)
_HALF: Final = (0.5, 0.5, 0.5)
_SHARPNESS: Final = -0.75
_SOFTER: Final = -0.5


def single_view(size: Size, layout: Layout) -> Sequence[View]:
    """For families that encode an image as one tile."""
    return ((layout.size,),)


def cut_square_tiles(frame: NDArray[T], side: int, across: int | None = None) -> Iterator[NDArray[T]]:
    """Of an image whose sides are multiples of `side`, or of `side` and `across`, row by row."""
    across = across or side
    for top in range(0, frame.shape[0], side):
        for left in range(0, frame.shape[1], across):
            yield frame[top : top + side, left : left + across]


def tile_lines(features: mx.array, columns: int, along: int) -> mx.array:
    """The features of tiles that are arranged in so many columns, `along` of them along each side of one, line by line:
    [lines, columns * along, numbers]."""
    numbers = features.shape[-1]
    return features.reshape(-1, columns, along, along, numbers).swapaxes(1, 2).reshape(-1, columns * along, numbers)


def with_line_ends(features: mx.array, end: mx.array) -> mx.array:
    """[lines, columns, numbers] with one more feature at the end of each line, flattened."""
    lines, _, numbers = features.shape
    ends = mx.broadcast_to(end.reshape(1, 1, numbers).astype(features.dtype), (lines, 1, numbers))
    return mx.concatenate([features, ends], axis=1).reshape(-1, numbers)


def on_canvas(frame: Pixels, canvas: Size, colour: int, half: Callable[[float], int] = math.floor) -> Pixels:
    """Centres the frame on a canvas. `half`: which whole number half of an odd one becomes."""
    height, width, _ = frame.shape
    filled = np.full((canvas.height, canvas.width, 3), colour, dtype=np.uint8)
    top, left = half((canvas.height - height) / 2), half((canvas.width - width) / 2)
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
    encoder: Encoder
    modules: Sequence[Any]
    patch: int
    hidden: int  # size of a feature
    normal: PixelNormalization
    project: RowFunction
    gather: GatherStates | None = None  # None: each state is a projector's input
    views: MakeViews = single_view
    cut: CutTiles | None = None  # None: the one view is the one tile
    arrange: ArrangeRows | None = None  # selects and orders the rows to project, where not all in order
    rotation: TileRotation | None = None
    learned: Callable[[Grid], mx.array] | None = None  # positions of a tile's patches, where they depend on its grid
    finish: ArrangeRows | None = None  # from projected rows to features, where those differ
    scaled: bool = False  # the language model multiplies its input embeddings by the root of their size
    bidirectional: bool = False
    stand_in: int | None = None
    deep: int = 0
    axes: tuple[int, ...] | None = None
    locate: LocateTokens | None = None  # where positions have three axes
    added: bool = False  # features to the embeddings of their tokens

    def positions(self, length: int, items: Sequence[MediaItem]) -> PositionArray | None:
        return None if self.locate is None else self.locate(length, items)

    def pixels(self, item: MediaItem) -> PixelArray:
        """[patches of all tiles, patch * patch * 3]"""
        views = self.views(item.source.size, item.layout)
        frames = list(item.source.frames(*views, resample=self.normal.resample))
        assert len(frames) == len(views), "an image is one frame"
        tiles = [self.normal(frames[0])] if self.cut is None else self.cut(frames, item.layout)
        grids = (Grid(1, grid.h, grid.w) for grid in item.layout.grids for _ in range(grid.t))
        return np.concatenate([self._patches(tile, grid) for tile, grid in zip(tiles, grids, strict=True)])

    def _patches(self, tile: PixelArray, grid: Grid) -> PixelArray:
        _, rows, columns = grid
        patch = self.patch
        tile = tile[: rows * patch, : columns * patch]  # what does not fill a patch is left out
        blocks = tile.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
        return blocks.reshape(rows * columns, patch * patch * 3)

    def encode(self, pixels: PixelArray, layout: Layout) -> EncodingSlices:
        gathered: list[mx.array] = []
        begin = 0
        for grid in layout.grids:
            own = pixels[begin : begin + grid.patches].reshape(grid.t, grid.h * grid.w, -1)
            begin += grid.patches
            angles = None if self.rotation is None else self.rotation(grid)
            learned = None if self.learned is None else self.learned(grid)
            together = max(1, TILE_PATCHES_TOGETHER // own.shape[1])
            for first in range(0, grid.t, together):
                states = yield from self.encoder.states(mx.array(own[first : first + together]), grid, angles, learned)
                features = states if self.gather is None else self.gather(states, grid)
                gathered.append(features.reshape(-1, features.shape[-1]))
                yield gathered[-1:]
        rows = mx.concatenate(gathered)
        rows = rows if self.arrange is None else self.arrange(rows, layout)
        each = rows.shape[1] * self.hidden + self.hidden**2  # a projector is one matrix, or two
        embeddings = yield from run_by_rows(self.project, self.encoder.slicing.rows(each), rows)
        embeddings = embeddings if self.finish is None else self.finish(embeddings, layout)
        embeddings = embeddings * self.hidden**-0.5 if self.scaled else embeddings
        assert embeddings.shape[0] == layout.features, "a layout says how many features there are"
        return VisionFeatures(embeddings, added=self.added)

    def needs(self, layout: Layout) -> EncodingBytes:
        grids, numbers = layout.grids, 3 * self.patch**2
        states = sum(grid.t * (grid.h * grid.w + 1) for grid in grids)
        kept = states * self.encoder.width * (1 if self.arrange is None else 2)  # that projectors wait for
        found = (layout.features if self.finish is None else 3 * states) * self.hidden
        work = self.encoder.held(grids, numbers) + 2 * kept + found
        return EncodingBytes(
            pixels=4 * sum(grid.patches for grid in grids) * numbers,
            work=4 * work,
            features=4 * layout.features * self.hidden,
        )


Resize = Callable[[PixelArray, Size], PixelArray]


def interpolated(learned: Callable[[], mx.array], resize: Resize) -> Callable[[Grid], mx.array]:
    """Positions [patches, width] of a grid, between those that were learned for a square [side * side, width]. They
    are read when they are first needed."""

    @lru_cache(maxsize=8)
    def positions(rows: int, columns: int) -> mx.array:
        table = learned()
        side = round(table.shape[0] ** 0.5)
        square = np.array(table.astype(mx.float32)).reshape(side, side, -1)
        resized = square if (rows, columns) == (side, side) else resize(square, Size(columns, rows))
        return mx.array(resized.reshape(rows * columns, -1)).astype(table.dtype)

    return lambda grid: positions(grid.h, grid.w)


def embedding_table(embedding: Any, count: int) -> Callable[[], mx.array]:
    """So many embeddings, also of a table that is quantised."""
    return lambda: embedding(mx.arange(count))


def resize_bicubic(frame: PixelArray, size: Size, *, antialias: bool = False) -> PixelArray:
    """Resizes [height, width, channels] from four by four neighbours, as torch's interpolate does: with `antialias`,
    and softer, from all that those cover which a smaller size has."""
    sharpness = _SOFTER if antialias else _SHARPNESS
    weigh = partial(_bicubic_weight, sharpness=sharpness)
    for axis, length in ((0, size.height), (1, size.width)):
        frame = _resize_axis(frame, axis, length, weigh, 2, antialias=antialias)
    return frame


def resize_bilinear(frame: PixelArray, size: Size, *, antialias: bool = False) -> PixelArray:
    """Resizes [height, width, channels] from two by two neighbours, or where `antialias` makes it smaller from all that
    a new one covers, as torch's interpolate does."""
    for axis, length in ((0, size.height), (1, size.width)):
        frame = _resize_axis(frame, axis, length, _bilinear_weight, 1, antialias=antialias)
    return frame


def _resize_axis(
    frame: PixelArray, axis: int, length: int, weigh: WeighNeighbour, reach: int, *, antialias: bool = False
) -> PixelArray:
    """`reach`: how many neighbours on each side of a place have a weight."""
    old = frame.shape[axis]
    covered = max(1.0, old / length) if antialias else 1.0
    at = (np.arange(length, dtype=np.float64) + 0.5) * (old / length) - 0.5
    first = np.floor(at).astype(np.int64)
    far = math.ceil(reach * covered)
    steps = range(1 - far, far + 1)
    weights = np.stack([weigh(np.abs(at - first - step) / covered) for step in steps])
    if antialias:  # what is not there does not count
        indices = np.stack([first + step for step in steps])
        weights *= (indices >= 0) & (indices < old)
        weights /= weights.sum(axis=0)
    shape = [1] * frame.ndim
    shape[axis] = length
    resized = np.zeros([length if each == axis else count for each, count in enumerate(frame.shape)], dtype=np.float64)
    for step, weight in zip(steps, weights, strict=True):
        resized += np.take(frame, np.clip(first + step, 0, old - 1), axis=axis) * weight.reshape(shape)
    return resized.astype(np.float32)


def _bilinear_weight(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(0.0, 1.0 - distance)


def _bicubic_weight(distance: NDArray[np.float64], sharpness: float) -> NDArray[np.float64]:
    """Of a neighbour at this distance."""
    a = sharpness
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
