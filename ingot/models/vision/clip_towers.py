"""The towers of LLaVA: CLIP or SigLIP, of LLaVA 1.5 on a square out of the picture's middle. LLaVA 1.6 sees the whole
picture as a square, and tiles of it on a canvas; lines of those tiles' features end in one of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles, edge
from ingot.media.layout import Layout
from ingot.media.picture import Pixels, View
from ingot.media.size import Size
from ingot.models.vision.frames import Normal
from ingot.models.vision.language import BESIDE, LanguagePart
from ingot.models.vision.qwen import CLIP
from ingot.models.vision.slicing import Slicing
from ingot.models.vision.tiles import Cut, TiledTower, Views, one_view, tiles
from ingot.models.vision.tower import PixelArray
from ingot.models.vision.vit import Vit, clip_layer, learned, up_to

PARTS: Final = ("vision_tower", "multi_modal_projector")
LINE_END: Final = "image_newline"
LANGUAGE: Final = LanguagePart(None, BESIDE)


def llava_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledTower:
    normal = Normal.stated(files.pictures, *CLIP)
    whole = model.config.vision_config.image_size
    shorter = edge(files.pictures, "size", whole) if files.pictures.get("do_center_crop", True) else None

    def views(size: Size, layout: Layout) -> Sequence[View]:
        return one_view(size, layout) if shorter is None else ((brought_to(size, shorter),),)

    def cut(shown: Sequence[Pixels], layout: Layout) -> list[PixelArray]:
        return [normal(middle(shown[0], layout.size))]

    return _tower(model, device, views, cut, normal.resample)


def llava_next_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledTower:
    """Raises ModelError where features are asked for that have no place on the canvas."""
    if model.config.vision_feature_select_strategy != "default":
        raise ModelError("vision_feature_select_strategy other than default is not supported: tiles have no class.")
    normal = Normal.stated(files.pictures, *CLIP)

    def side_of(layout: Layout) -> int:
        return int(layout.grid.h * model.config.vision_config.patch_size)

    def views(size: Size, layout: Layout) -> Sequence[View]:
        whole = Size(side_of(layout), side_of(layout))
        return ((whole,),) if layout.covered is None else ((whole,), (within(size, layout.size),))

    def cut(shown: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        side = side_of(layout)
        yield normal(shown[0])
        if layout.covered is not None:
            canvas = on_black(shown[1], layout.size)
            yield from map(normal, tiles(canvas, side))

    def lined(features: mx.array, layout: Layout) -> mx.array:
        if layout.covered is None:
            return features
        tiles, along, numbers = layout.grid.t, layout.grid.h, features.shape[-1]
        each = features.shape[0] // tiles
        columns = layout.size.width // (along * model.config.vision_config.patch_size)
        lines = features[each:].reshape(-1, columns, along, along, numbers).swapaxes(1, 2)
        lines = lines.reshape(-1, columns * along, numbers)
        top, left = (lines.shape[0] - layout.covered.height) // 2, (lines.shape[1] - layout.covered.width) // 2
        seen = lines[top : top + layout.covered.height, left : left + layout.covered.width]
        ends = mx.broadcast_to(model[LINE_END].astype(features.dtype), (seen.shape[0], 1, numbers))
        return mx.concatenate([features[:each], mx.concatenate([seen, ends], axis=1).reshape(-1, numbers)])

    return replace(_tower(model, device, views, cut, normal.resample), finish=lined)


def _tower(model: Any, device: Device, views: Views, cut: Cut, resample: int) -> TiledTower:
    vision, stated = model.vision_tower.vision_model, model.config.vision_config
    embeddings = vision.embeddings
    clip = stated.model_type == "clip_vision_model"
    vit = Vit(
        embeddings.patch_embedding,
        [clip_layer(layer) for layer in up_to(vision.encoder.layers, model.config.vision_feature_layer)],
        stated.num_attention_heads,
        Slicing.on(device),
        positions=learned(embeddings),
        first=embeddings.class_embedding if clip else None,
        opening=vision.pre_layrnorm if clip else None,
    )
    # "default" leaves out the first row, also where it is no class: as mlx-vlm and transformers do.
    begin = 1 if model.config.vision_feature_select_strategy == "default" else 0

    def seen(states: mx.array, layout: Layout) -> mx.array:
        return states[:, begin:]

    return TiledTower(
        vit,
        (model.vision_tower, model.multi_modal_projector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        views=views,
        cut=cut,
        resample=resample,
        gather=seen,
        project=model.multi_modal_projector,
    )


def brought_to(size: Size, shorter: int) -> Size:
    """With a shorter side of so many pixels."""
    width, height = size
    return Size(shorter, shorter * height // width) if width <= height else Size(shorter * width // height, shorter)


def middle(frame: Pixels, size: Size) -> Pixels:
    top, left = (frame.shape[0] - size.height) // 2, (frame.shape[1] - size.width) // 2
    return frame[top : top + size.height, left : left + size.width]


def within(size: Size, canvas: Size) -> Size:
    """As large as fits on a canvas."""
    across, down = canvas.width / size.width, canvas.height / size.height
    if across < down:
        return Size(canvas.width, min(math.ceil(size.height * across), canvas.height))
    return Size(min(math.ceil(size.width * down), canvas.width), canvas.height)


def on_black(frame: Pixels, canvas: Size) -> Pixels:
    """In the middle of a canvas."""
    height, width, _ = frame.shape
    made = np.zeros((canvas.height, canvas.width, 3), dtype=np.uint8)
    top, left = (canvas.height - height) // 2, (canvas.width - width) // 2
    made[top : top + height, left : left + width] = frame
    return made
