"""The tower of Idefics 3 and SmolVLM: SigLIP on each tile, of whose states a block becomes one feature."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles
from ingot.media.families.idefics import Idefics
from ingot.media.layout import Layout
from ingot.media.picture import Pixels
from ingot.media.size import Size
from ingot.models.vision.frames import Normal, resized
from ingot.models.vision.language import LanguagePart
from ingot.models.vision.slicing import Slicing
from ingot.models.vision.tiled import TiledTower
from ingot.models.vision.tower import PixelArray
from ingot.models.vision.vit import Vit, clip_layer, learned, merged

PARTS: Final = ("vision_model", "connector")
LANGUAGE: Final = LanguagePart(
    "llama",
    (
        ("model.text_model.", "model."),
        ("lm_head.", "lm_head."),
        ("language_model.lm_head.", "lm_head."),
        ("language_model.", "model."),
    ),
)
LANCZOS: Final = 1


def idefics_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledTower:
    vision, stated = model.vision_model, model.config.vision_config
    vit = Vit(
        vision.embeddings.patch_embedding,
        [clip_layer(layer) for layer in vision.encoder.layers],
        stated.num_attention_heads,
        Slicing.on(device),
        positions=learned(vision.embeddings),
        closing=vision.post_layernorm,
    )
    rules = Idefics.of(files)
    normal = Normal.stated(files.pictures, resample=LANCZOS)

    def cut(frame: Pixels, layout: Layout) -> Iterator[PixelArray]:
        return map(normal, tiles(frame, layout, rules, normal.resample))

    def shuffled(states: mx.array, layout: Layout) -> mx.array:
        return merged(states, layout, model.config.scale_factor)

    return TiledTower(
        vit,
        (vision, model.connector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        cut=cut,
        gather=shuffled,
        project=model.connector.modality_projection,
    )


def tiles(frame: Pixels, layout: Layout, rules: Idefics, resample: int) -> Iterator[Pixels]:
    """Line by line, and the whole picture last. It is resized twice on the way, as the family's own processor does."""
    height, width, _ = frame.shape
    whole, side = Size(rules.tile, rules.tile), rules.tile
    enlarged = resized(frame, rules.enlarged(Size(width, height)), resample)
    arranged = resized(enlarged, layout.size, resample)
    if layout.grid.t > 1:
        for top in range(0, layout.size.height, side):
            for left in range(0, layout.size.width, side):
                yield arranged[top : top + side, left : left + side]
    yield resized(arranged, whole, resample)
