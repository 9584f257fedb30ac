"""Phi 3.5 vision: tiles of a picture that is padded to them, and the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.media.families.files import ProcessorFiles
from ingot.media.families.pictures_only import PicturesOnly
from ingot.media.families.wishes import refuse_pixels
from ingot.media.layout import Grid, Layout, MediaKind, PictureWish, Placeholder
from ingot.media.size import Size

IMAGE = "<|image|>"


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
        return {"image": Placeholder(IMAGE, IMAGE)}

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        refuse_pixels(wish, "Phi 3.5")
        columns, rows = self._arranged(size, 1 if wish.detail == "low" else self.tiles)
        tiles = columns * rows
        features = (tiles + 1) * self.along**2 + 1 + (rows + 1) * self.along
        resized = Size(columns * self.side, rows * self.side)
        return Layout(resized, Grid(tiles + 1, 2 * self.along, 2 * self.along), IMAGE, IMAGE, (features,))

    def _arranged(self, size: Size, most: int) -> tuple[int, int]:
        """As many tiles along the longer side as fit when the shorter has what its share asks for."""
        ratio = max(size) / min(size)
        along = 1
        while (along + 1) * math.ceil((along + 1) / ratio) <= most:
            along += 1
        across = math.ceil(int(along * self.side / ratio) / self.side)
        return (along, across) if size.width >= size.height else (across, along)
