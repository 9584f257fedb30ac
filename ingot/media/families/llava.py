"""LLaVA 1.5: a square of one size. LLaVA 1.6: tiles besides, on the canvas that wastes least, without its edges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ingot.media.families.files import ProcessorFiles, edge
from ingot.media.families.pictures_only import PicturesOnly
from ingot.media.families.wishes import refuse_pixels
from ingot.media.layout import Grid, Layout, MediaKind, PictureWish, Placeholder
from ingot.media.size import Size

IMAGE = "<image>"


@dataclass(frozen=True, slots=True)
class Llava(PicturesOnly):
    side: int
    patch: int
    further: int  # features beside those of patches
    canvases: tuple[Size, ...] = ()  # that tiles make up; none: the square alone

    @classmethod
    def of(cls, files: ProcessorFiles) -> Llava:
        patch = files.processor.get("patch_size") or files.vision.get("patch_size", 14)
        side = edge(files.pictures, "crop_size", edge(files.vision, "image_size", 336))
        strategy = files.processor.get("vision_feature_select_strategy") or files.config.get(
            "vision_feature_select_strategy", "default"
        )
        extra = files.processor.get("num_additional_image_tokens")
        # Without a word on it the tower gives one feature for the whole picture, which "default" leaves out.
        further = (1 if extra is None else int(extra)) - (strategy == "default")
        canvases: tuple[Size, ...] = ()
        if files.family == "llava_next":
            stated = files.pictures.get("image_grid_pinpoints") or files.config.get("image_grid_pinpoints") or ()
            canvases = tuple(Size(width, height) for height, width in stated)
        return cls(side, int(patch), further, canvases)

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(IMAGE, IMAGE)}

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        refuse_pixels(wish, "LLaVA")
        along = self.side // self.patch
        base = along * along + self.further
        if not self.canvases or wish.detail == "low":
            return Layout(Size(self.side, self.side), Grid(1, along, along), IMAGE, IMAGE, (base,))
        canvas = least_wasteful(size, self.canvases)
        columns, rows = canvas.width // self.side, canvas.height // self.side
        kept = unpadded(size, Size(columns * along, rows * along))
        features = kept.area + kept.height  # every line ends in a feature of its own
        return Layout(canvas, Grid(columns * rows + 1, along, along), IMAGE, IMAGE, (base + features,), covered=kept)


def least_wasteful(size: Size, canvases: Iterable[Size]) -> Size:
    """The canvas that shows most of the picture, and of those the one with the least left over."""

    def judged(canvas: Size) -> tuple[int, int]:
        scale = min(canvas.width / size.width, canvas.height / size.height)
        shown = min(int(size.width * scale) * int(size.height * scale), size.area)
        return shown, shown - canvas.area

    return max(canvases, key=judged)


def unpadded(size: Size, patches: Size) -> Size:
    """The patches of a canvas that the picture covers when it is fitted into it."""
    if size.width / size.height > patches.width / patches.height:
        height = int(round(size.height * (patches.width / size.width), 7))
        return Size(patches.width, patches.height - (patches.height - height) // 2 * 2)
    width = int(round(size.width * (patches.height / size.height), 7))
    return Size(patches.width - (patches.width - width) // 2 * 2, patches.height)
