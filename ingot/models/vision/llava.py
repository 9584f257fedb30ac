"""LLaVA 1.5's tower: CLIP or SigLIP on a square out of the picture's middle."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.media.decoding import Pixels
from ingot.media.families.files import ProcessorFiles, edge
from ingot.media.layout import Layout
from ingot.media.size import Size
from ingot.models.vision.blocks import Slicing
from ingot.models.vision.frames import Normal, resized
from ingot.models.vision.language import BESIDE, LanguagePart
from ingot.models.vision.qwen import CLIP
from ingot.models.vision.tiled import TiledTower
from ingot.models.vision.tower import PixelArray
from ingot.models.vision.vit import Vit, clip_layer, learned, up_to

PARTS: Final = ("vision_tower", "multi_modal_projector")
LANGUAGE: Final = LanguagePart(None, BESIDE)


def llava_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledTower:
    vision, stated = model.vision_tower.vision_model, model.config.vision_config
    embeddings = vision.embeddings
    clip = stated.model_type == "clip_vision_model"
    vit = Vit(
        embeddings.patch_embedding,
        [clip_layer(layer) for layer in up_to(vision.encoder.layers, model.config.vision_feature_layer)],
        stated.num_attention_heads,
        Slicing.on(device, stated.hidden_size),
        positions=learned(embeddings),
        first=embeddings.class_embedding if clip else None,
        opening=vision.pre_layrnorm if clip else None,
    )
    # "default" leaves out the first row, also where it is no class: as mlx-vlm and transformers do.
    begin = 1 if model.config.vision_feature_select_strategy == "default" else 0
    normal = Normal.stated(files.pictures, *CLIP)
    shorter = edge(files.pictures, "size", stated.image_size) if files.pictures.get("do_center_crop", True) else None

    def cut(frame: Pixels, layout: Layout) -> list[PixelArray]:
        if shorter is None:
            return [normal(resized(frame, layout.size, normal.resample))]
        return [normal(middle(frame, shorter, layout.size, normal.resample))]

    def seen(states: mx.array, layout: Layout) -> mx.array:
        return states[:, begin:]

    return TiledTower(
        vit,
        (model.vision_tower, model.multi_modal_projector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        cut=cut,
        gather=seen,
        project=model.multi_modal_projector,
    )


def middle(frame: Pixels, shorter: int, size: Size, resample: int) -> Pixels:
    """A picture whose shorter side is brought to `shorter` pixels, of which the middle is taken."""
    height, width, _ = frame.shape
    scaled = Size(shorter, shorter * height // width) if width <= height else Size(shorter * width // height, shorter)
    small = resized(frame, scaled, resample)
    top, left = (small.shape[0] - size.height) // 2, (small.shape[1] - size.width) // 2
    return small[top : top + size.height, left : left + size.width]
