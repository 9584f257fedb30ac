"""Gemma 3's tower: SigLIP on a square, whose states are pooled to as many features as any picture has."""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx

from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles
from ingot.media.layout import Layout
from ingot.models.vision.frames import Normal
from ingot.models.vision.slicing import Slicing
from ingot.models.vision.tiles import TiledTower, one_view
from ingot.models.vision.vit import Vit, clip_layer, learned

PARTS: Final = ("vision_tower", "multi_modal_projector")
BILINEAR: Final = 2


def gemma_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledTower:
    """Raises ModelError where the checkpoint cuts pictures, which is not done."""
    if files.pictures.get("do_pan_and_scan"):
        raise ModelError("do_pan_and_scan of preprocessor_config.json is not supported: pictures are shown whole.")
    vision, projector = model.vision_tower.vision_model, model.multi_modal_projector
    stated = model.config.vision_config
    vit = Vit(
        vision.embeddings.patch_embedding,
        [clip_layer(layer) for layer in vision.encoder.layers],
        stated.num_attention_heads,
        Slicing.on(device),
        positions=learned(vision.embeddings),
        closing=vision.post_layernorm,
    )
    hidden = int(model.config.text_config.hidden_size)
    normal = Normal.stated(files.pictures, resample=BILINEAR)

    def pooled(states: mx.array, layout: Layout) -> mx.array:
        tiles, _, width = states.shape
        side, step = projector.tokens_per_side, projector.kernel_size
        blocks = states.reshape(tiles, side, step, side, step, width)
        return blocks.mean(axis=(2, 4)).reshape(tiles, side * side, width)

    def projected(rows: mx.array) -> mx.array:
        weight = projector.mm_input_projection_weight
        # The language model multiplies whatever it is given by the root of its size.
        return projector.mm_soft_emb_norm(rows) @ weight * hidden**-0.5

    return TiledTower(
        vit,
        (model.vision_tower, projector),
        stated.patch_size,
        hidden,
        views=one_view,
        cut=lambda shown, layout: [normal(shown[0])],
        resample=normal.resample,
        gather=pooled,
        project=projected,
        mutual=True,
    )
