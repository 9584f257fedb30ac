"""Phi 3.5 vision and Phi 4 multimodal: tiles without the edges that the picture leaves empty, and the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ingot.errors import BadMedia
from ingot.media.families.files import ProcessorFiles, edge
from ingot.media.families.pictures_only import PicturesOnly
from ingot.media.families.tiles import arrangement
from ingot.media.families.wishes import refuse_pixels
from ingot.media.layout import Grid, Layout, MediaKind, PictureWish, Placeholder
from ingot.media.size import Size

IMAGE3, IMAGE4 = "<|image|>", "<|endoftext10|>"
_THINNEST: Final = 10  # pixels


@dataclass(frozen=True, slots=True)
class Phi3(PicturesOnly):
    """A tile of 336 pixels is 12 by 12 features, and each line of them ends in one more."""

    tiles: int
    side: int = 336
    along: int = 12

    @classmethod
    def of(cls, files: ProcessorFiles) -> Phi3:
        return cls(int(files.pictures.get("num_crops", 16)))

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(IMAGE3, IMAGE3)}

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        refuse_pixels(wish, "Phi 3.5")
        columns, rows = self._arranged(size, 1 if wish.detail == "low" else self.tiles)
        tiles = columns * rows
        features = (tiles + 1) * self.along**2 + 1 + (rows + 1) * self.along
        resized = Size(columns * self.side, rows * self.side)
        return Layout(resized, Grid(tiles + 1, 2 * self.along, 2 * self.along), IMAGE3, IMAGE3, (features,))

    def _arranged(self, size: Size, most: int) -> tuple[int, int]:
        """As many tiles along the longer side as fit when the shorter has what its share asks for."""
        ratio = max(size) / min(size)
        along = 1
        while (along + 1) * math.ceil((along + 1) / ratio) <= most:
            along += 1
        across = math.ceil(int(along * self.side / ratio) / self.side)
        return (along, across) if size.width >= size.height else (across, along)


@dataclass(frozen=True, slots=True)
class Phi4(PicturesOnly):
    tiles: int
    side: int = 448
    patch: int = 14

    @classmethod
    def of(cls, files: ProcessorFiles) -> Phi4:
        side, patch = edge(files.pictures, "size", 448), int(files.pictures.get("patch_size", 14))
        return cls(int(files.pictures.get("dynamic_hd", 36)), side, patch)

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(IMAGE4, IMAGE4)}

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        refuse_pixels(wish, "Phi 4")
        columns, rows = -(-size.width // self.side), -(-size.height // self.side)
        most = 1 if wish.detail == "low" else self.tiles
        if columns * rows > most:
            columns, rows = arrangement(size, self.side, (1, most))
        canvas = Size(columns * self.side, rows * self.side)
        covered = self._covered(size, canvas)
        along = self.side // self.patch
        # Two by two patches leave one feature; every line ends in one more, and one stands between whole and tiles.
        wide, high = (self._features(covered.width, columns), self._features(covered.height, rows))
        half = along // 2
        features = half * half + 1 + wide * high + high + half
        return Layout(canvas, Grid(columns * rows + 1, along, along), IMAGE4, IMAGE4, (features,))

    def _covered(self, size: Size, canvas: Size) -> Size:
        """What of the canvas the picture covers, in patches."""
        scale_x, scale_y = canvas.width / size.width, canvas.height / size.height
        if scale_x < scale_y:
            fit = Size(canvas.width, int(size.height * scale_x))
        else:
            fit = Size(int(size.width * scale_y), canvas.height)
        if min(fit) < _THINNEST:
            raise BadMedia(f"the picture would be {fit.width} by {fit.height} pixels to the model. Cut it.")
        # What it leaves empty counts in whole patches.
        empty = Size(*((whole - side) // self.patch for whole, side in zip(canvas, fit, strict=True)))
        return Size(canvas.width // self.patch - empty.width, canvas.height // self.patch - empty.height)

    def _features(self, covered: int, tiles: int) -> int:
        """Every second patch of each tile, as far as the picture goes."""
        along = self.side // self.patch
        return sum(-(-max(0, min(along, covered - tile * along)) // 2) for tile in range(tiles))
