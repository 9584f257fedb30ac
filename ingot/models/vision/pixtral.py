"""The tower of Pixtral and Mistral 3: pictures of any shape, whose patches turn by row and column."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles
from ingot.media.layout import Layout
from ingot.models.vision.frames import Normal
from ingot.models.vision.qwen import CLIP
from ingot.models.vision.slicing import Slicing
from ingot.models.vision.tiles import TiledTower, one_view
from ingot.models.vision.vit import Angles, RowWork, Vit, VitLayer, joined, merged, up_to

PARTS: Final = ("vision_tower", "multi_modal_projector")


def pixtral_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledTower:
    vision, stated = model.vision_tower.vision_model, model.config.vision_config
    layers = up_to(vision.transformer.layers, model.config.vision_feature_layer)
    vit = Vit(
        vision.patch_conv,
        [_layer(layer) for layer in layers],
        stated.num_attention_heads,
        Slicing.on(device),
        opening=vision.ln_pre,
    )
    normal = Normal.stated(files.pictures, *CLIP)
    merge, project = _merging(model.multi_modal_projector)

    def gathered(states: mx.array, layout: Layout) -> mx.array:
        return merged(states, layout, merge)

    return TiledTower(
        vit,
        (model.vision_tower, model.multi_modal_projector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        views=one_view,
        cut=lambda shown, layout: [normal(shown[0])],
        resample=normal.resample,
        gather=gathered,
        project=project,
        turn=lambda layout: angles(layout.grid.h, layout.grid.w, stated.head_dim, stated.rope_theta),
    )


def _layer(layer: Any) -> VitLayer:
    own = layer.attention
    return VitLayer(
        layer.attention_norm, joined(own.q_proj, own.k_proj, own.v_proj), own.o_proj, layer.ffn_norm, layer.feed_forward
    )


def _merging(projector: Any) -> tuple[int, RowWork]:
    """How many patches by as many become a feature, and how. Mistral 3 norms each of them first."""
    after: Callable[[mx.array], mx.array] = lambda rows: projector.linear_2(projector.gelu(projector.linear_1(rows)))  # noqa: E731
    if "patch_merger" not in projector:
        return 1, after
    merger = projector.patch_merger
    along = merger.spatial_merge_size

    def project(rows: mx.array) -> mx.array:
        count, numbers = rows.shape
        normed = projector.norm(rows.reshape(count, along * along, -1))
        # Its weights are of torch's unfold, in which channels come first.
        return after(merger.merging_layer(normed.swapaxes(1, 2).reshape(count, numbers)))

    return along, project


@lru_cache(maxsize=8)
def angles(rows: int, columns: int, size: int, theta: float) -> Angles:
    """Of a head's frequencies every second turns by the row, and behind them every other by the column."""
    speeds = 1.0 / theta ** (np.arange(0, size, 2, dtype=np.float32) / size)
    down, across = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    turns = np.concatenate([down.reshape(-1, 1) * speeds[::2], across.reshape(-1, 1) * speeds[1::2]], axis=-1)
    turned = mx.array(turns.astype(np.float32))[:, None]
    return mx.cos(turned), mx.sin(turned)
