"""InternVL: up to a dozen square tiles in the arrangement nearest to the picture's shape, and the whole picture."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.media.families.files import ProcessorFiles, edge
from ingot.media.families.pictures_only import PicturesOnly
from ingot.media.families.tiles import arrangement
from ingot.media.families.wishes import refuse_pixels
from ingot.media.layout import Grid, Layout, MediaKind, PictureWish, Placeholder
from ingot.media.size import Size

IMAGE, START, END = "<IMG_CONTEXT>", "<img>", "</img>"


@dataclass(frozen=True, slots=True)
class InternVL(PicturesOnly):
    side: int
    patch: int
    tokens: int  # of a tile
    tiles: tuple[int, int]

    @classmethod
    def of(cls, files: ProcessorFiles) -> InternVL:
        side = edge(files.pictures, "size", edge(files.vision, "image_size", 448))
        patch = edge(files.vision, "patch_size", 14)
        ratio = float(files.config.get("downsample_ratio", 0.5))
        tokens = files.processor.get("image_seq_length") or int((side // patch) ** 2 * ratio**2)
        cropped = files.pictures.get("crop_to_patches", True)
        most = files.pictures.get("max_patches") or files.config.get("max_dynamic_patch") or 12
        least = files.pictures.get("min_patches") or files.config.get("min_dynamic_patch") or 1
        return cls(side, patch, int(tokens), (int(least), int(most)) if cropped else (1, 1))

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(IMAGE, IMAGE)}

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        refuse_pixels(wish, "InternVL")
        single = wish.detail == "low" or self.tiles[1] == 1
        columns, rows = (1, 1) if single else arrangement(size, self.side, self.tiles)
        tiles = columns * rows
        shown = tiles + 1 if tiles > 1 else 1
        along = self.side // self.patch
        resized = Size(columns * self.side, rows * self.side)
        return Layout(resized, Grid(shown, along, along), IMAGE, START + IMAGE + END, (self.tokens * shown,))
