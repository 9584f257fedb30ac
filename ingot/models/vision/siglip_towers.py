"""InternVL's tower: each tile and the whole picture for itself, of whose states a block becomes one feature."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles
from ingot.media.layout import Layout
from ingot.media.picture import Pixels, View
from ingot.media.size import Size
from ingot.models.vision.frames import Normal
from ingot.models.vision.language import BESIDE, LanguagePart
from ingot.models.vision.slicing import Slicing
from ingot.models.vision.tiles import TiledTower, tiles
from ingot.models.vision.tower import PixelArray
from ingot.models.vision.vit import RowWork, Vit, VitLayer, joined, merged

PARTS: Final = ("vision_tower", "multi_modal_projector")
CHAT_PARTS: Final = ("vision_model", "mlp1")
LANGUAGE: Final = LanguagePart(None, BESIDE)
IMAGENET: Final = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def internvl_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledTower:
    vision, stated = model.vision_tower, model.config.vision_config
    embeddings = vision.embeddings
    vit = Vit(
        embeddings.patch_embeddings.projection,
        [_layer(layer) for layer in vision.encoder.layer],
        stated.num_attention_heads,
        Slicing.on(device),
        positions=embeddings.position_embeddings,
        first=embeddings.cls_token,
    )
    return _tower(model, files, vit, (vision, model.multi_modal_projector), model.multi_modal_projector)


def internvl_chat_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledTower:
    vision, stated = model.vision_model, model.config.vision_config
    vit = Vit(
        vision.embeddings.patch_embedding,
        [_chat_layer(layer) for layer in vision.encoder.layers],
        stated.num_attention_heads,
        Slicing.on(device),
        positions=vision.embeddings.position_embedding,
        first=vision.embeddings.class_embedding,
    )
    projector = nn.Sequential(*model.mlp1)
    return _tower(model, files, vit, (vision, projector), projector)


def _tower(model: Any, files: ProcessorFiles, vit: Vit, modules: tuple[Any, ...], project: RowWork) -> TiledTower:
    stated = model.config.vision_config
    normal = Normal.stated(files.pictures, *IMAGENET)
    along = round(1 / model.config.downsample_ratio)

    side = int(stated.image_size)

    def views(size: Size, layout: Layout) -> Sequence[View]:
        arranged, whole = (layout.size,), (Size(side, side),)
        return (arranged, whole) if layout.grid.t > 1 else (arranged,)

    def cut(shown: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        """Line by line, and the whole picture last where there is more than one."""
        return map(normal, (*tiles(shown[0], side), *shown[1:]))

    def shuffled(states: mx.array, layout: Layout) -> mx.array:
        return merged(states[:, 1:], layout, along)

    return TiledTower(
        vit,
        modules,
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        views=views,
        cut=cut,
        resample=normal.resample,
        gather=shuffled,
        project=project,
    )


def _layer(layer: Any) -> VitLayer:
    own = layer.attention
    joint = joined(
        lambda rows: own.q_norm(own.q_proj(rows)),
        lambda rows: own.k_norm(own.k_proj(rows)),
        lambda rows: own.v_proj(rows),
    )
    scales = (layer.lambda_1, layer.lambda_2)
    return VitLayer(layer.layernorm_before, joint, own.projection_layer, layer.layernorm_after, layer.mlp, scales)


def _chat_layer(layer: Any) -> VitLayer:
    own = layer.attn

    def normed(rows: mx.array) -> mx.array:
        queries, keys, values = mx.split(own.qkv(rows), 3, axis=-1)
        return mx.concatenate([own.q_norm(queries), own.k_norm(keys), values], axis=-1)

    joint = normed if own.qk_normalization else own.qkv
    return VitLayer(layer.norm1, joint, own.proj, layer.norm2, layer.mlp, (layer.ls1, layer.ls2))
