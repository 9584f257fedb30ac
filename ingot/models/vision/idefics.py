"""The tower of Idefics 3 and SmolVLM: SigLIP on each tile, of whose states a block becomes one feature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles
from ingot.media.families.idefics import Idefics
from ingot.media.layout import Layout
from ingot.media.picture import Pixels, View
from ingot.media.size import Size
from ingot.models.vision.frames import Normal
from ingot.models.vision.language import LanguagePart
from ingot.models.vision.slicing import Slicing
from ingot.models.vision.tiles import TiledTower, tiles
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

    def views(size: Size, layout: Layout) -> Sequence[View]:
        """Resized twice on the way to tiles, and once more to the whole, as the family's own processor does."""
        arranged = (rules.enlarged(size), layout.size)
        whole = (*arranged, Size(rules.tile, rules.tile))
        return (arranged, whole) if layout.grid.t > 1 else (whole,)

    def cut(shown: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        """Line by line, and the whole picture last."""
        *arranged, whole = shown
        for tile in arranged and tiles(arranged[0], rules.tile):
            yield normal(tile)
        yield normal(whole)

    def shuffled(states: mx.array, layout: Layout) -> mx.array:
        return merged(states, layout, model.config.scale_factor)

    return TiledTower(
        vit,
        (vision, model.connector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        views=views,
        cut=cut,
        resample=normal.resample,
        gather=shuffled,
        project=model.connector.modality_projection,
    )
