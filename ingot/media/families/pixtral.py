"""Pixtral and Mistral 3: pictures within a square, never enlarged; a token breaks each line of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.media.families.files import ProcessorFiles, edge
from ingot.media.families.pictures_only import PicturesOnly
from ingot.media.families.wishes import refuse_pixels
from ingot.media.layout import Grid, Layout, MediaKind, PictureWish, Placeholder
from ingot.media.size import Size

IMAGE, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
LOW_DETAIL = 512


@dataclass(frozen=True, slots=True)
class Pixtral(PicturesOnly):
    longest: int
    patch: int
    merge: int

    @classmethod
    def of(cls, files: ProcessorFiles) -> Pixtral:
        patch = files.processor.get("patch_size") or edge(files.pictures, "patch_size", 16)
        merge = files.processor.get("spatial_merge_size") or files.config.get("spatial_merge_size") or 1
        return cls(edge(files.pictures, "size", 1024), int(patch), int(merge))

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(IMAGE, IMAGE)}

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        refuse_pixels(wish, "Pixtral")
        longest = min(self.longest, LOW_DETAIL) if wish.detail == "low" else self.longest
        ratio = max(size) / longest
        if ratio > 1:
            size = Size(*(max(1, math.floor(side / ratio)) for side in size))
        unit = self.patch * self.merge
        columns, rows = -(-size.width // unit), -(-size.height // unit)
        written = (IMAGE + BREAK) * (rows - 1) + IMAGE + END
        grid = Grid(1, rows * self.merge, columns * self.merge)
        return Layout(Size(columns * unit, rows * unit), grid, IMAGE, written, (columns,) * rows)
