"""Gemma 3: every picture a square of one size, which becomes as many tokens as any other."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.media.families.files import ProcessorFiles, edge
from ingot.media.families.pictures_only import PicturesOnly
from ingot.media.families.wishes import refuse_pixels
from ingot.media.layout import Grid, Layout, MediaKind, PictureWish, Placeholder
from ingot.media.size import Size

START, SOFT, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True, slots=True)
class Gemma(PicturesOnly):
    side: int
    patch: int
    tokens: int

    @classmethod
    def of(cls, files: ProcessorFiles) -> Gemma:
        tokens = files.processor.get("image_seq_length") or files.pictures.get("image_seq_length") or 256
        side = edge(files.pictures, "size", edge(files.vision, "image_size", 896))
        return cls(side, int(files.vision.get("patch_size", 14)), int(tokens))

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(START, START)}

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        refuse_pixels(wish, "Gemma 3")
        along = self.side // self.patch
        written = f"\n\n{START}{SOFT}{END}\n\n"
        return Layout(Size(self.side, self.side), Grid(1, along, along), SOFT, written, (self.tokens,))
