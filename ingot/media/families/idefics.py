"""Idefics 3 and SmolVLM: tiles in rows, each behind its place, and the whole picture once more, small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ingot.media.families.files import ProcessorFiles, edge
from ingot.media.families.pictures_only import PicturesOnly
from ingot.media.families.wishes import refuse_pixels
from ingot.media.layout import Grid, Layout, MediaKind, PictureWish, Placeholder
from ingot.media.size import Size

IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
LONGEST: Final = 4096


@dataclass(frozen=True, slots=True)
class Idefics(PicturesOnly):
    longest: int  # side that every picture is brought to
    tile: int
    patch: int
    tokens: int  # of a tile
    tiled: bool = True

    @classmethod
    def of(cls, files: ProcessorFiles) -> Idefics:
        tile = edge(files.pictures, "max_image_size", 364)
        patch = int(files.vision.get("patch_size", 14))
        scale = int(files.config.get("scale_factor", 2))
        tokens = files.processor.get("image_seq_len") or (tile // patch) ** 2 // scale**2
        longest = edge(files.pictures, "size", 4 * tile)
        return cls(longest, tile, patch, int(tokens), bool(files.pictures.get("do_image_splitting", True)))

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(IMAGE, IMAGE)}

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        refuse_pixels(wish, "Idefics 3")
        along = self.tile // self.patch
        if not self.tiled or wish.detail == "low":
            return self._layout(Size(self.tile, self.tile), 0, 0, along)
        resized = self._in_tiles(self.enlarged(size))
        rows, columns = resized.height // self.tile, resized.width // self.tile
        if (rows, columns) == (1, 1):
            rows = columns = 0
        return self._layout(resized, rows, columns, along)

    def _layout(self, resized: Size, rows: int, columns: int, along: int) -> Layout:
        lines = "".join(
            "".join(f"{AROUND}<row_{row}_col_{column}>{IMAGE}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        written = f"{lines}{chr(10) if lines else ''}{AROUND}{WHOLE}{IMAGE}{AROUND}"
        tiles = rows * columns + 1
        return Layout(resized, Grid(tiles, along, along), IMAGE, written, (self.tokens,) * tiles)

    def enlarged(self, size: Size) -> Size:
        """The longer side as long as is stated, the shorter even, and neither beyond what any model takes."""
        aspect = size.width / size.height
        if size.width >= size.height:
            width, height = self.longest, int(self.longest / aspect)
            height += height % 2
        else:
            width, height = int(self.longest * aspect), self.longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        aspect = width / height
        if width >= height and width > LONGEST:
            width, height = LONGEST, int(LONGEST / aspect)
        elif height > width and height > LONGEST:
            width, height = int(LONGEST * aspect), LONGEST
        return Size(max(width, 1), max(height, 1))

    def _in_tiles(self, size: Size) -> Size:
        aspect = size.width / size.height
        if size.width >= size.height:
            width = self._tiled(size.width)
            return Size(width, self._tiled(int(width / aspect)))
        height = self._tiled(size.height)
        return Size(self._tiled(int(height * aspect)), height)

    def _tiled(self, side: int) -> int:
        return math.ceil(side / self.tile) * self.tile
