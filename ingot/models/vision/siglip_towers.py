"""The vision towers of Gemma 3, Idefics 3 and SmolVLM (SigLIP), of InternVL (InternViT), of MiniCPM-V 4.6,
and of Llama 4.

Gemma 3 sees a square, whose states are pooled to as many features as any image has. The others see each tile and the
whole image for itself; a block of states becomes one feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.media.image_processors import IdeficsProcessor
from ingot.media.images import BILINEAR, LANCZOS, Pixels, View
from ingot.media.layout import Grid, Layout, Size
from ingot.media.processor_parts import ProcessorFiles
from ingot.models.vision.tiles import PixelNormalization, TiledVisionTower, cut_square_tiles
from ingot.models.vision.tower import LANGUAGE_PREFIXES, LanguagePart, PixelArray
from ingot.models.vision.vit import (
    RowFunction,
    Vit,
    VitLayer,
    VitMerging,
    VitRotation,
    WorkSlicing,
    clip_layer,
    clip_vit,
    grid_rotation,
    joint_projection_of,
    merge_patches,
    multiplications_per_row,
)

GEMMA_PARTS: Final = ("vision_tower", "multi_modal_projector")


def gemma_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """Raises ModelError where the checkpoint needs pan and scan."""
    if files.image_config.get("do_pan_and_scan"):
        raise ModelError("do_pan_and_scan of preprocessor_config.json is not supported: images are encoded whole.")
    vision, projector = model.vision_tower.vision_model, model.multi_modal_projector
    stated = model.config.vision_config
    heads = stated.num_attention_heads
    vit = clip_vit(vision, vision.encoder.layers, heads, device, closing=vision.post_layernorm)
    hidden = int(model.config.text_config.hidden_size)

    def pool(states: mx.array, grid: Grid) -> mx.array:
        tiles, _, width = states.shape
        side, step = projector.tokens_per_side, projector.kernel_size
        blocks = states.reshape(tiles, side, step, side, step, width)
        return blocks.mean(axis=(2, 4)).reshape(tiles, side * side, width)

    def project(rows: mx.array) -> mx.array:
        weight = projector.mm_input_projection_weight
        # The language model multiplies its input embeddings by the root of its size.
        return projector.mm_soft_emb_norm(rows) @ weight * hidden**-0.5

    return TiledVisionTower(
        vit,
        (model.vision_tower, projector),
        stated.patch_size,
        hidden,
        PixelNormalization.stated(files.image_config, resample=BILINEAR),
        gather=pool,
        project=project,
        bidirectional=True,
    )


IDEFICS_PARTS: Final = ("vision_model", "connector")
IDEFICS_LANGUAGE: Final = LanguagePart(
    "llama",
    (
        ("model.text_model.", "model."),
        ("lm_head.", "lm_head."),
        ("language_model.lm_head.", "lm_head."),
        ("language_model.", "model."),
    ),
)


def idefics_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    vision, stated = model.vision_model, model.config.vision_config
    heads = stated.num_attention_heads
    vit = clip_vit(vision, vision.encoder.layers, heads, device, closing=vision.post_layernorm)
    rules = IdeficsProcessor.of(files)
    normal = PixelNormalization.stated(files.image_config, resample=LANCZOS)

    def views(size: Size, layout: Layout) -> Sequence[View]:
        """Resized twice for tiles, and once more for the whole, as the family's own processor does."""
        tiled = (rules.enlarged(size), layout.size)
        whole = (*tiled, Size(rules.tile, rules.tile))
        return (tiled, whole) if layout.grid.t > 1 else (whole,)

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        """Row by row, and the whole image last."""
        *tiled, whole = frames
        for tile in tiled and cut_square_tiles(tiled[0], rules.tile):
            yield normal(tile)
        yield normal(whole)

    return TiledVisionTower(
        vit,
        (vision, model.connector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        normal,
        views=views,
        cut=cut,
        gather=lambda states, grid: merge_patches(states, grid, model.config.scale_factor),
        project=model.connector.modality_projection,
    )


INTERNVL_PARTS: Final = ("vision_tower", "multi_modal_projector")
INTERNVL_CHAT_PARTS: Final = ("vision_model", "mlp1")
INTERNVL_LANGUAGE: Final = LanguagePart(None, LANGUAGE_PREFIXES)
HALF: Final = (0.5, 0.5, 0.5)
IMAGENET_NORMALIZATION: Final = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def internvl_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    vision, stated = model.vision_tower, model.config.vision_config
    embeddings = vision.embeddings
    vit = Vit(
        embeddings.patch_embeddings.projection,
        [_internvl_layer(layer) for layer in vision.encoder.layer],
        stated.num_attention_heads,
        WorkSlicing.on(device),
        positions=embeddings.position_embeddings,
        first=embeddings.cls_token,
    )
    return _internvl_tower(model, files, vit, (vision, model.multi_modal_projector), model.multi_modal_projector)


def internvl_chat_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    vision, stated = model.vision_model, model.config.vision_config
    vit = Vit(
        vision.embeddings.patch_embedding,
        [_internvl_chat_layer(layer) for layer in vision.encoder.layers],
        stated.num_attention_heads,
        WorkSlicing.on(device),
        positions=vision.embeddings.position_embedding,
        first=vision.embeddings.class_embedding,
    )
    projector = nn.Sequential(*model.mlp1)
    return _internvl_tower(model, files, vit, (vision, projector), projector)


def _internvl_tower(
    model: Any, files: ProcessorFiles, vit: Vit, modules: tuple[Any, ...], project: RowFunction
) -> TiledVisionTower:
    stated = model.config.vision_config
    normal = PixelNormalization.stated(files.image_config, *IMAGENET_NORMALIZATION)
    along, side = round(1 / model.config.downsample_ratio), int(stated.image_size)

    def views(size: Size, layout: Layout) -> Sequence[View]:
        tiled, whole = (layout.size,), (Size(side, side),)
        return (tiled, whole) if layout.grid.t > 1 else (tiled,)

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        """Row by row, and the whole image last where there are several tiles."""
        return map(normal, (*cut_square_tiles(frames[0], side), *frames[1:]))

    return TiledVisionTower(
        vit,
        modules,
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        normal,
        views=views,
        cut=cut,
        gather=lambda states, grid: merge_patches(states[:, 1:], grid, along),
        project=project,
    )


def _internvl_layer(layer: Any) -> VitLayer:
    own = layer.attention
    joint = joint_projection_of(
        lambda rows: own.q_norm(own.q_proj(rows)),
        lambda rows: own.k_norm(own.k_proj(rows)),
        lambda rows: own.v_proj(rows),
    )
    scales = (layer.lambda_1, layer.lambda_2)
    return VitLayer(layer.layernorm_before, joint, own.projection_layer, layer.layernorm_after, layer.mlp, scales)


def _internvl_chat_layer(layer: Any) -> VitLayer:
    own = layer.attn

    def project_normed(rows: mx.array) -> mx.array:
        queries, keys, values = mx.split(own.qkv(rows), 3, axis=-1)
        return mx.concatenate([own.q_norm(queries), own.k_norm(keys), values], axis=-1)

    joint = project_normed if own.qk_normalization else own.qkv
    return VitLayer(layer.norm1, joint, own.proj, layer.norm2, layer.mlp, (layer.ls1, layer.ls2))


MINICPM_PARTS: Final = ("vision_tower", "vit_merger", "merger")
MINICPM_LANGUAGE: Final = LanguagePart(
    "qwen3_5",
    (
        ("model.language_model.", "model.language_model."),
        ("language_model.", "language_model."),
        ("llm.", "language_model."),
        ("lm_head.", "lm_head."),
    ),
    None,
)


def minicpm_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """Blocks of patches become one behind some of the layers, and again behind all. Raises ModelError where they do so
    more often."""
    vision, stated = model.vision_tower, model.config.vision_config
    if len(model.merger.mlp) != 1:
        raise ModelError("merger_times other than 1 is not supported.")
    merges = files.image_config.get("downsample_mode", model.config.downsample_mode) != "4x"
    vit = Vit(
        vision.embeddings.patch_embedding,
        [clip_layer(layer) for layer in vision.encoder.layers],
        stated.num_attention_heads,
        WorkSlicing.on(device),
        closing=vision.post_layernorm,
        merging=_minicpm_merging(int(model.config.insert_layer_id) + 1, model.vit_merger) if merges else None,
    )
    patch, side = int(stated.patch_size), int(stated.image_size) // int(stated.patch_size)
    normal = PixelNormalization.stated(
        files.image_config, files.image_config.get("norm_mean") or HALF, files.image_config.get("norm_std") or HALF
    )

    def slices_of(layout: Layout) -> tuple[Size, Grid] | None:
        """The size of the larger image, and the grid of one of its slices."""
        if layout.arranged is None or layout.apart is None:
            return None
        (columns, rows), grid = layout.arranged, layout.apart
        return Size(columns * grid.w * patch, rows * grid.h * patch), grid

    def views(size: Size, layout: Layout) -> Sequence[View]:
        sliced = slices_of(layout)
        return ((layout.size,),) if sliced is None else ((layout.size,), (sliced[0],))

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        """The whole image, and then slices row by row."""
        yield normal(frames[0])
        if (sliced := slices_of(layout)) is not None:
            height, width = sliced[1].h * patch, sliced[1].w * patch
            for top in range(0, frames[1].shape[0], height):
                for left in range(0, frames[1].shape[1], width):
                    yield normal(frames[1][top : top + height, left : left + width])

    def learned(grid: Grid) -> mx.array:
        """Each patch has the position of the nearest one before it in a square."""
        down, across = (np.minimum(np.arange(count) * side // count, side - 1) for count in (grid.h, grid.w))
        numbers = (down[:, None] * side + across[None]).reshape(-1).astype(np.int32)
        positions: mx.array = vision.embeddings.position_embedding(mx.array(numbers))
        return positions

    def gather(states: mx.array, grid: Grid) -> mx.array:
        return merge_patches(states, Grid(grid.t, grid.h // 2, grid.w // 2) if merges else grid, 2)

    return TiledVisionTower(
        vit,
        (vision, model.vit_merger, model.merger),
        patch,
        int(model.config.text_config.hidden_size),
        normal,
        views=views,
        cut=cut,
        gather=gather,
        project=model.merger.mlp[0],
        learned=learned,
    )


def _minicpm_merging(behind: int, merger: Any) -> VitMerging:
    """The rows of a block attend to each other before they become one."""

    def merge(blocks: mx.array) -> mx.array:
        windows = blocks.reshape(blocks.shape[0], 4, -1)
        normed = merger.layer_norm1(windows)
        windows = windows + merger.self_attn(normed, normed, normed)
        merged = merger.linear_2(merger.act(merger.linear_1(merger.pre_norm(windows.reshape(blocks.shape)))))
        joined: mx.array = merged + windows.mean(axis=1)
        return joined

    each = multiplications_per_row(merger) + 3 * multiplications_per_row(merger.self_attn)
    return VitMerging(behind, merge, each)


LLAMA4_PARTS: Final = ("vision_model", "multi_modal_projector")


def llama4_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """The class, which is behind a tile's patches in the model, is before them here: rows attend alike in any order."""
    vision, stated = model.vision_model, model.config.vision_config
    learned, patch = vision.positional_embedding_vlm, int(stated.patch_size)

    def colours_first(rows: mx.array) -> mx.array:
        return rows.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2).reshape(rows.shape)

    vit = Vit(
        vision.patch_embedding.linear,
        [_llama4_layer(layer) for layer in vision.model.layers],
        stated.num_attention_heads,
        WorkSlicing.on(device),
        positions=mx.concatenate([learned[-1:], learned[:-1]]),
        first=vision.class_embedding,
        before=colours_first,
        opening=vision.layernorm_pre,
        closing=vision.layernorm_post,
    )
    normal = PixelNormalization.stated(files.image_config, resample=BILINEAR)
    side, along = int(stated.image_size), round(1 / stated.pixel_shuffle_ratio)
    adapter = vision.vision_adapter

    def views(size: Size, layout: Layout) -> Sequence[View]:
        whole = Size(side, side)
        return ((layout.size,), (whole,)) if layout.grid.t > 1 else ((layout.size,),)

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        """Row by row of a canvas whose right and lower edges are black, and the whole image last."""
        assert layout.arranged is not None, "an image has columns and rows of tiles"
        height, width = layout.arranged.height * side, layout.arranged.width * side
        canvas = np.zeros((height, width, 3), dtype=np.uint8)
        canvas[: frames[0].shape[0], : frames[0].shape[1]] = frames[0]
        return map(normal, (*cut_square_tiles(canvas, side), *frames[1:]))

    def rotation(grid: Grid) -> VitRotation:
        """Columns and rows are counted from one, and the class is not rotated."""
        return grid_rotation(
            grid, stated.hidden_size // stated.num_attention_heads, float(stated.rope_theta), "columns first", begin=1
        )

    return TiledVisionTower(
        vit,
        (vision, model.multi_modal_projector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        normal,
        views=views,
        cut=cut,
        gather=lambda states, grid: merge_patches(states[:, 1:], grid, along),
        project=lambda rows: model.multi_modal_projector(adapter.mlp(rows)),
        rotation=rotation,
    )


def _llama4_layer(layer: Any) -> VitLayer:
    own = layer.self_attn
    joint = joint_projection_of(own.q_proj, own.k_proj, own.v_proj)
    return VitLayer(
        layer.input_layernorm, joint, own.o_proj, layer.post_attention_layernorm, layer.mlp, pairs="neighbours"
    )
