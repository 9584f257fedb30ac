"""The vision towers of Gemma 4, GLM-4.xV and GLM-OCR, Kimi VL and K2.5, LFM2-VL, MiniMax M3, PaddleOCR-VL and Phi 4,
which see an image in its own shape: one tile of as many patches as its sides ask for. Gemma 4 unified's has no layers.

Positions are rotary, by column and row, or learned for a square and interpolated for the image's shape, or both.
LFM2-VL cuts a large image into square tiles, and sees the whole in its own shape behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.media.images import BILINEAR, Pixels, View
from ingot.media.layout import Grid, Layout, Size
from ingot.media.processor_parts import ProcessorFiles
from ingot.models.vision.qwen import CLIP_NORMALIZATION, contiguous_mrope_axes, mrope_positions
from ingot.models.vision.tiles import (
    PixelNormalization,
    TiledVisionTower,
    cut_square_tiles,
    embedding_table,
    interpolated,
    resize_bicubic,
    resize_bilinear,
)
from ingot.models.vision.tower import BARE_PREFIXES, LANGUAGE_PREFIXES, LanguagePart, PixelArray
from ingot.models.vision.vit import (
    Vit,
    VitLayer,
    VitRotation,
    WorkSlicing,
    grid_rotation,
    joint_projection_of,
    layers_up_to,
    merge_patches,
)

GEMMA4_PARTS: Final = ("vision_tower", "embed_vision")
GEMMA4_NORMALIZATION: Final = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
"""The tower maps colours from 0 to 1 to between -1 and 1, which is done here with the pixels."""


def gemma4_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    vision, stated, text = model.vision_tower, model.config.vision_config, model.config.text_config
    hidden = int(text.hidden_size)
    embedder = vision.patch_embedder
    vit = Vit(
        embedder.input_proj,
        [_gemma4_layer(layer.self_attn, layer) for layer in vision.encoder.layers],
        stated.num_attention_heads,
        WorkSlicing.on(device),
    )
    table, along = embedder.position_embedding_table, int(stated.pooling_kernel_size)

    def learned(grid: Grid) -> mx.array:
        """By column and by row."""
        both = table[0][: grid.w][None] + table[1][: grid.h][:, None]
        return both.reshape(grid.h * grid.w, -1)

    def pool(states: mx.array, grid: Grid) -> mx.array:
        tiles, _, width = states.shape
        blocks = states.reshape(tiles, grid.h // along, along, grid.w // along, along, width)
        pooled = blocks.astype(mx.float32).mean(axis=(2, 4)).reshape(tiles, -1, width) * width**0.5
        pooled = pooled.astype(states.dtype)
        return (pooled - vision.std_bias) * vision.std_scale if stated.standardize else pooled

    normal = PixelNormalization.stated({**files.image_config, "do_normalize": True}, *GEMMA4_NORMALIZATION)
    return TiledVisionTower(
        vit,
        (vision, model.embed_vision),
        stated.patch_size,
        hidden,
        normal,
        gather=pool,
        project=model.embed_vision,
        scaled=True,
        rotation=lambda grid: grid_rotation(
            grid, stated.head_dim, float(stated.rope_parameters["rope_theta"]), "columns first"
        ),
        learned=learned,
        bidirectional=text.use_bidirectional_attention == "vision",
        stand_in=int(text.pad_token_id) if text.hidden_size_per_layer_input else None,
    )


def _gemma4_layer(own: Any, layer: Any) -> VitLayer:
    heads, kv_heads, size = own.num_heads, own.num_kv_heads, own.head_dim

    def joint(rows: mx.array) -> mx.array:
        """Its scores are not scaled, as ours are."""
        count = rows.shape[0]
        queries = own.q_norm(own.q_proj(rows).reshape(count, heads, size)) * size**0.5
        keys = own.k_norm(own.k_proj(rows).reshape(count, kv_heads, size))
        values = own._v_norm(own.v_proj(rows).reshape(count, kv_heads, size))
        repeated = (mx.repeat(each, heads // kv_heads, axis=1) for each in (keys, values))
        return mx.concatenate([each.reshape(count, -1) for each in (queries, *repeated)], axis=-1)

    return VitLayer(
        layer.input_layernorm,
        joint,
        own.o_proj,
        layer.pre_feedforward_layernorm,
        layer.mlp,
        after=(layer.post_attention_layernorm, layer.post_feedforward_layernorm),
        pairs="axes",
    )


GEMMA4_UNIFIED_PARTS: Final = ("vision_embedder", "embed_vision")


def gemma4_unified_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """Without an encoder: large patches are normed and multiplied by one matrix."""
    embedder, stated, text = model.vision_embedder, model.config.vision_config, model.config.text_config
    hidden = int(text.hidden_size)
    vit = Vit(
        embedder.patch_dense,
        (),
        1,
        WorkSlicing.on(device),
        before=embedder.patch_ln1,
        embedded=embedder.patch_ln2,
        opening=embedder.pos_norm,
    )
    table = embedder.pos_embedding

    def learned(grid: Grid) -> mx.array:
        """By column and by row."""
        both = table[: grid.w, 0][None] + table[: grid.h, 1][:, None]
        return both.reshape(grid.h * grid.w, -1)

    return TiledVisionTower(
        vit,
        (embedder, model.embed_vision),
        stated.model_patch_size,
        hidden,
        PixelNormalization.stated({**files.image_config, "do_normalize": False}),
        project=model.embed_vision,
        scaled=True,
        learned=learned,
        bidirectional=text.use_bidirectional_attention == "vision",
        stand_in=int(text.pad_token_id) if text.hidden_size_per_layer_input else None,
    )


GLM_PARTS: Final = ("vision_tower",)
GLM_LANGUAGE: Final = LanguagePart("glm4", LANGUAGE_PREFIXES)
GLM_MOE_LANGUAGE: Final = LanguagePart("glm4_moe", LANGUAGE_PREFIXES)
GLM_THETA: Final = 10000.0


def glm_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """GLM-OCR's has no learned positions, and norms queries and keys."""
    vision, stated = model.vision_tower, model.config.vision_config
    merge = int(stated.spatial_merge_size)
    vit = Vit(
        _for_one_frame(vision.patch_embed.proj),
        [_glm_layer(block, stated.num_heads) for block in vision.blocks],
        stated.num_heads,
        WorkSlicing.on(device),
        embedded=vision.post_conv_layernorm if "post_conv_layernorm" in vision else None,
        closing=vision.post_layernorm,
    )
    downsample, count = vision.downsample, (stated.image_size // stated.patch_size) ** 2
    weight = downsample.weight.reshape(downsample.weight.shape[0], -1)

    def project(rows: mx.array) -> mx.array:
        """Blocks of patches become one by a convolution, which is a product."""
        merged: mx.array = vision.merger(rows @ weight.T + downsample.bias)
        return merged

    return TiledVisionTower(
        vit,
        (vision,),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        PixelNormalization.stated(files.image_config, *CLIP_NORMALIZATION),
        gather=lambda states, grid: merge_patches(states, grid, merge),
        project=project,
        rotation=lambda grid: grid_rotation(grid, stated.hidden_size // stated.num_heads, GLM_THETA),
        learned=interpolated(embedding_table(vision.embeddings.position_embedding, count), resize_bicubic)
        if "embeddings" in vision
        else None,
        **_mrope(config, merge),
    )


def _glm_layer(block: Any, heads: int) -> VitLayer:
    own = block.attn

    def joint(rows: mx.array) -> mx.array:
        qkv: mx.array = own.qkv(rows)
        if "q_norm" not in own:
            return qkv
        queries, keys, values = mx.split(qkv.reshape(rows.shape[0], 3, heads, -1), 3, axis=1)
        return mx.concatenate([own.q_norm(queries), own.k_norm(keys), values], axis=1).reshape(rows.shape[0], -1)

    return VitLayer(block.norm1, joint, own.proj, block.norm2, block.mlp)


def _for_one_frame(proj: Any) -> nn.Module:
    """The convolution of pairs of frames, for an image, which is both."""
    single = nn.Module()
    single.weight = proj.weight.sum(axis=1)
    if "bias" in proj:
        single.bias = proj.bias
    return single


def _mrope(config: dict[str, Any], merge: int) -> dict[str, Any]:
    """Positions of three axes, as the language model's config states them."""
    text = config.get("text_config") or config
    stated = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return {
        "axes": contiguous_mrope_axes(stated.get("mrope_section") or (8, 12, 12)),
        "locate": partial(mrope_positions, merge=merge),
    }


KIMI_VL_PARTS: Final = ("vision_tower", "multi_modal_projector")
KIMI_K25_PARTS: Final = ("vision_tower", "mm_projector")
KIMI_VL_LANGUAGE: Final = LanguagePart("deepseek_v3", LANGUAGE_PREFIXES)
KIMI_THETA: Final = 10000.0
BLACK: Final = 0


def kimi_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    k25 = "mm_projector" in model
    vision, stated = model.vision_tower, model.config.vision_config
    projector = model.mm_projector if k25 else model.multi_modal_projector
    merge = int(stated.merge_kernel_size[0])
    vit = Vit(
        vision.patch_embed.proj,
        [_kimi_layer(block) for block in vision.blocks],
        stated.num_heads,
        WorkSlicing.on(device),
        closing=vision.final_layernorm,
    )
    media = files.image_config.get("media_proc_cfg") or files.image_config
    normal = PixelNormalization.stated(media, *(() if k25 else CLIP_NORMALIZATION))

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        yield normal(_on_patches(frames[0], layout, stated.patch_size))

    def project(rows: mx.array) -> mx.array:
        normed = projector.pre_norm(rows.reshape(rows.shape[0], merge * merge, -1)).reshape(rows.shape[0], -1)
        if k25:
            projected: mx.array = projector.proj(normed)
        else:
            projected = projector.linear_2(projector.act(projector.linear_1(normed)))
        return projected

    return TiledVisionTower(
        vit,
        (vision, projector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        normal,
        cut=cut,
        gather=lambda states, grid: merge_patches(states, grid, merge),
        project=project,
        rotation=lambda grid: grid_rotation(grid, stated.embed_dim // stated.num_heads, KIMI_THETA, "alternating"),
        learned=interpolated(lambda: vision.patch_embed.pos_emb.weight.flatten(end_axis=1), resize_bicubic),
    )


def _kimi_layer(block: Any) -> VitLayer:
    return VitLayer(block.norm0, block.attn.wqkv, block.attn.wo, block.norm1, block.mlp, pairs="neighbours")


def _on_patches(frame: Pixels, layout: Layout, patch: int) -> Pixels:
    """The frame with black at its right and lower edge, or without its edges, as large as its grid."""
    height, width = layout.grid.h * patch, layout.grid.w * patch
    top, left = max(0, frame.shape[0] - height) // 2, max(0, frame.shape[1] - width) // 2
    frame = frame[top : top + height, left : left + width]
    below, beside = height - frame.shape[0], width - frame.shape[1]
    return np.pad(frame, ((0, below), (0, beside), (0, 0)), constant_values=BLACK)


LFM_PARTS: Final = ("vision_tower", "multi_modal_projector")
LFM_LANGUAGE: Final = LanguagePart("lfm2", LANGUAGE_PREFIXES)


def lfm_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    vision, stated = model.vision_tower, model.config.vision_config
    vit = Vit(
        vision.embeddings.patch_embedding,
        [_siglip_layer(layer) for layer in vision.encoder.layers],
        stated.num_attention_heads,
        WorkSlicing.on(device),
        closing=vision.post_layernorm,
    )
    normal = PixelNormalization.stated(files.image_config)
    patch, along = int(stated.patch_size), int(model.config.downsample_factor)

    def views(size: Size, layout: Layout) -> Sequence[View]:
        return ((layout.size,),) if layout.apart is None else ((layout.size,), (_size_of(layout.apart, patch),))

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        """Row by row, and the whole image last."""
        if layout.apart is None:
            yield normal(frames[0])
            return
        yield from map(normal, cut_square_tiles(frames[0], layout.grid.h * patch))
        yield normal(frames[1])

    return TiledVisionTower(
        vit,
        (vision, model.multi_modal_projector),
        patch,
        int(model.config.text_config.hidden_size),
        normal,
        views=views,
        cut=cut,
        gather=lambda states, grid: merge_patches(states, grid, along),
        project=model.multi_modal_projector,
        learned=_naflex_positions(vision, stated),
    )


PHI4_PARTS: Final = ("vision_tower", "mm_projector")
PHI4_LANGUAGE: Final = LanguagePart("phi3", BARE_PREFIXES, None)
PHI4_SIZES: Final = ("hidden_size", "num_attention_heads", "num_key_value_heads")


def phi4_stated(config: dict[str, Any]) -> dict[str, Any]:
    """mlx-vlm reads the language model's sizes, which are in the whole config, in one of its own."""
    return {**config, "text_config": {name: config[name] for name in PHI4_SIZES if name in config}}


def phi4_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """Each patch becomes a feature. Raises ModelError for a tower that sees squares."""
    if "naflex" not in str(config.get("mm_vision_tower") or "naflex"):
        raise ModelError(f"mm_vision_tower {config['mm_vision_tower']} is not supported: towers of NaFlex are.")
    vision, stated = model.vision_tower.vision_tower.vision_model, model.config.vision_config
    layers = layers_up_to(vision.encoder.layers, model.config.mm_vision_select_layer)
    vit = Vit(
        vision.embeddings.patch_embedding,
        [_siglip_layer(layer) for layer in layers],
        stated.num_attention_heads,
        WorkSlicing.on(device),
    )
    return TiledVisionTower(
        vit,
        (model.vision_tower, model.mm_projector),
        int(stated.patch_size),
        int(model.config.text_config.hidden_size),
        PixelNormalization.stated(files.image_config, resample=BILINEAR),
        project=model.mm_projector,
        learned=_naflex_positions(vision, stated),
    )


def _naflex_positions(vision: Any, stated: Any) -> Callable[[Grid], mx.array]:
    table = embedding_table(vision.embeddings.position_embedding, stated.num_patches)
    return interpolated(table, partial(resize_bilinear, antialias=True))


def _size_of(grid: Grid, patch: int) -> Size:
    return Size(grid.w * patch, grid.h * patch)


def _siglip_layer(layer: Any) -> VitLayer:
    own = layer.self_attn
    joint = own.qkv if "qkv" in own else joint_projection_of(own.q_proj, own.k_proj, own.v_proj)
    return VitLayer(layer.layer_norm1, joint, own.out_proj, layer.layer_norm2, layer.mlp)


MINIMAX_PARTS: Final = ("vision_tower", "multi_modal_projector", "patch_merge_mlp")


def minimax_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """Raises ModelError where the config selects the features of several layers, or leaves some out."""
    vision, stated = model.vision_tower.vision_model, model.config.vision_config
    if model.config.vision_feature_select_strategy != "full":
        raise ModelError("vision_feature_select_strategy other than full is not supported: there is no class.")
    merge, heads = int(stated.spatial_merge_size), int(stated.num_attention_heads)
    size = stated.hidden_size // heads
    axis = 2 * (2 * (size // 2) // 3 // 2)  # numbers of a head that are rotated by each of time, rows and columns
    order, patches = _rotated_first(size, 3 * axis), nn.Module()
    weight = vision.embeddings.patch_embedding.weight
    patches.weight = weight.sum(axis=2).transpose(0, 2, 3, 1)  # of pairs of frames, of which an image is both
    vit = Vit(
        patches,
        [
            replace(_siglip_layer(layer), pairs=order)
            for layer in layers_up_to(vision.encoder.layers, model.config.vision_feature_layer)
        ],
        heads,
        WorkSlicing.on(device),
        opening=vision.pre_layrnorm,
    )

    def project(rows: mx.array) -> mx.array:
        """Each patch, and then blocks of them."""
        projected = model.multi_modal_projector(rows.reshape(rows.shape[0], merge * merge, -1))
        merged: mx.array = model.patch_merge_mlp(projected.reshape(rows.shape[0], -1))
        return merged

    def rotation(grid: Grid) -> VitRotation:
        speeds = 1.0 / float(stated.rope_theta) ** (np.arange(0, axis, 2, dtype=np.float32) / axis)
        down, across = np.meshgrid(np.arange(grid.h), np.arange(grid.w), indexing="ij")
        by_axis = [at.reshape(-1, 1) * speeds for at in (np.zeros_like(down), down, across)]
        still = np.zeros((down.size, size // 2 - 3 * axis // 2))
        angles = mx.array(np.concatenate([*by_axis, still], axis=-1).astype(np.float32))[:, None]
        return mx.cos(angles), mx.sin(angles)

    return TiledVisionTower(
        vit,
        (model.vision_tower, model.multi_modal_projector, model.patch_merge_mlp),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        PixelNormalization.stated(files.image_config, *CLIP_NORMALIZATION),
        gather=lambda states, grid: merge_patches(states, grid, merge),
        project=project,
        rotation=rotation,
    )


def _rotated_first(size: int, rotated: int) -> tuple[int, ...]:
    """The order of a head's numbers in which its halves are rotated together, where only its first ones are rotated."""
    half, still = rotated // 2, (size - rotated) // 2
    first = [*range(half), *range(rotated, rotated + still)]
    return (*first, *range(half, rotated), *range(rotated + still, size))


PADDLE_PARTS: Final = ("visual",)
PADDLE_LANGUAGE: Final = LanguagePart("llama", (*LANGUAGE_PREFIXES, ("model.", "model.")), None)
PADDLE_THETA: Final = 10000.0


def paddle_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    vision, stated = model.visual, model.config.vision_config
    merge, projector = int(stated.spatial_merge_size), vision.projector
    count = (stated.image_size // stated.patch_size) ** 2
    vit = Vit(
        vision.embeddings.patch_embedding,
        [_siglip_layer(layer) for layer in vision.layers],
        stated.num_attention_heads,
        WorkSlicing.on(device),
        closing=vision.post_layernorm,
    )

    def project(rows: mx.array) -> mx.array:
        normed = projector.pre_norm(rows.reshape(rows.shape[0], merge * merge, -1)).reshape(rows.shape[0], -1)
        projected: mx.array = projector.linear_2(projector.act(projector.linear_1(normed)))
        return projected

    return TiledVisionTower(
        vit,
        (vision,),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        PixelNormalization.stated(files.image_config, *CLIP_NORMALIZATION),
        gather=lambda states, grid: merge_patches(states, grid, merge),
        project=project,
        rotation=lambda grid: grid_rotation(grid, stated.hidden_size // stated.num_attention_heads, PADDLE_THETA),
        learned=interpolated(embedding_table(vision.embeddings.position_embedding, count), resize_bilinear),
        **_mrope(config, merge),
    )
