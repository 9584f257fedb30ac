"""The vision towers of Gemma 3, Idefics 3 and SmolVLM (SigLIP), of InternVL (InternViT), of MiniCPM-V, and of Llama 4.

Gemma 3 sees a square, whose states are pooled to as many features as any image has. The others see each tile and the
whole image for itself; a block of states becomes one feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
    TILE_PATCHES_TOGETHER,
    Encoder,
    RowFunction,
    VisionWork,
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
    run_by_rows,
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

    def pool(states: mx.array, grid: Grid) -> mx.array:
        tiles, _, width = states.shape
        side, step = projector.tokens_per_side, projector.kernel_size
        blocks = states.reshape(tiles, side, step, side, step, width)
        return blocks.mean(axis=(2, 4)).reshape(tiles, side * side, width)

    return TiledVisionTower(
        vit,
        (model.vision_tower, projector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        PixelNormalization.stated(files.image_config, resample=BILINEAR),
        gather=pool,
        project=lambda rows: projector.mm_soft_emb_norm(rows) @ projector.mm_input_projection_weight,
        scaled=True,
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
    """4.6: blocks of patches become one behind some of the layers, and again behind all. Raises ModelError where they
    do so more often."""
    if len(model.merger.mlp) != 1:
        raise ModelError("merger_times other than 1 is not supported.")
    merges = files.image_config.get("downsample_mode", model.config.downsample_mode) != "4x"
    merging = _minicpm_merging(int(model.config.insert_layer_id) + 1, model.vit_merger) if merges else None

    def gather(states: mx.array, grid: Grid) -> mx.array:
        return merge_patches(states, Grid(grid.t, grid.h // 2, grid.w // 2) if merges else grid, 2)

    return replace(
        _minicpm_tower(model, files, _minicpm_vit(model, device, merging)),
        modules=(model.vision_tower, model.vit_merger, model.merger),
        gather=gather,
        project=model.merger.mlp[0],
    )


def minicpm_resampled_tower(
    model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device
) -> TiledVisionTower:
    """2.6 to 4.5, and MiniCPM-o: learned queries attend to a slice's states."""
    resampler = model.resampler
    return replace(
        _minicpm_tower(model, files, ResampledVit(_minicpm_vit(model, device), resampler)),
        modules=(model.vision_tower, resampler),
        project=lambda rows: resampler.ln_post(resampler.attn.out_proj(rows)) @ resampler.proj,
    )


def _minicpm_vit(model: Any, device: Device, merging: VitMerging | None = None) -> Vit:
    vision = model.vision_tower
    return Vit(
        vision.embeddings.patch_embedding,
        [clip_layer(layer) for layer in vision.encoder.layers],
        model.config.vision_config.num_attention_heads,
        WorkSlicing.on(device),
        closing=vision.post_layernorm,
        merging=merging,
    )


def _minicpm_tower(model: Any, files: ProcessorFiles, encoder: Encoder) -> TiledVisionTower:
    embeddings, stated = model.vision_tower.embeddings, model.config.vision_config
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
            yield from map(normal, cut_square_tiles(frames[1], sliced[1].h * patch, sliced[1].w * patch))

    def learned(grid: Grid) -> mx.array:
        """Each patch has the position of the nearest one before it in a square."""
        down, across = (np.minimum(np.arange(count) * side // count, side - 1) for count in (grid.h, grid.w))
        numbers = (down[:, None] * side + across[None]).reshape(-1).astype(np.int32)
        positions: mx.array = embeddings.position_embedding(mx.array(numbers))
        return positions

    return TiledVisionTower(
        encoder,
        (),
        patch,
        int(model.config.text_config.hidden_size),
        normal,
        views=views,
        cut=cut,
        project=lambda rows: rows,
        learned=learned,
    )


@dataclass(frozen=True, slots=True)
class ResampledVit:
    """What each of a resampler's queries finds in a tile's states."""

    vit: Vit
    resampler: Any  # mlx-vlm's module

    @property
    def slicing(self) -> WorkSlicing:
        return self.vit.slicing

    @property
    def width(self) -> int:
        return int(self.resampler.query.shape[-1])

    def held(self, grids: Sequence[Grid], numbers: int) -> int:
        """See `Encoder`."""
        tile = max(grid.h * grid.w for grid in grids)
        seen = max(tile, min(TILE_PATCHES_TOGETHER, sum(grid.patches for grid in grids)))
        queries = self.resampler.query.shape[0] * -(-seen // tile)
        scores = 3 * self.resampler.attn.num_heads * queries * tile
        return self.vit.held(grids, numbers) + seen * (6 * self.width + self.vit.width) + scores

    def states(
        self, pixels: mx.array, grid: Grid, angles: VitRotation | None = None, learned: mx.array | None = None
    ) -> VisionWork:
        """See `Encoder`."""
        states = yield from self.vit.states(pixels, grid, angles, learned)
        tiles, rows, _ = states.shape
        resampler, attention, width = self.resampler, self.resampler.attn, self.width

        def keys_and_values(rows: mx.array, places: mx.array) -> mx.array:
            normed = resampler.ln_kv(resampler.kv_proj(rows))
            keys = attention.k_proj(normed + places.astype(normed.dtype))
            return mx.concatenate([keys, attention.v_proj(normed)], axis=-1)

        each = 2 * width**2 + width * self.vit.width
        places = mx.tile(_wave_positions(grid.h, grid.w, width), (tiles, 1))
        taken = yield from run_by_rows(
            keys_and_values, self.slicing.rows(each), states.reshape(tiles * rows, -1), places
        )
        queries = attention.q_proj(resampler.ln_q(resampler.query))
        heads = attention.num_heads
        queries = mx.broadcast_to(queries[None], (tiles, *queries.shape)).reshape(tiles, -1, heads, width // heads)
        keys, values = (each.reshape(tiles, rows, heads, -1) for each in mx.split(taken, 2, axis=-1))
        found = mx.fast.scaled_dot_product_attention(
            *(part.swapaxes(1, 2) for part in (queries, keys, values)), scale=(width // heads) ** -0.5
        )
        found = found.swapaxes(1, 2).reshape(tiles, -1, width)
        yield [found]
        return found


@lru_cache(maxsize=8)
def _wave_positions(rows: int, columns: int, width: int) -> mx.array:
    """[rows * columns, width]: sines and cosines by column, and then by row."""
    speeds = 1.0 / 10000.0 ** (np.arange(width // 4, dtype=np.float64) / (width / 4))
    down, across = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    angles = [at.reshape(-1, 1) * speeds for at in (across, down)]
    waves = [wave(angle) for angle in angles for wave in (np.sin, np.cos)]
    return mx.array(np.concatenate(waves, axis=-1).astype(np.float32))


MINICPM_RESAMPLED_PARTS: Final = ("vision_tower", "resampler")


def minicpm_language_type(config: Mapping[str, Any]) -> str:
    """By the version that a checkpoint states. Raises ModelError for one that is not known."""
    version = f"{float(config.get('version') or 0):.1f}"
    if version not in MINICPM_LANGUAGES:
        raise ModelError(f"MiniCPM of version {version} is not supported: {', '.join(MINICPM_LANGUAGES)} are.")
    return MINICPM_LANGUAGES[version]


MINICPM_LANGUAGES: Final = {"2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}
MINICPM_RESAMPLED_LANGUAGE: Final = LanguagePart(minicpm_language_type, (("llm.", ""), ("language_model.", "")), None)


def minicpm_stated(config: dict[str, Any]) -> dict[str, Any]:
    """As mlx-vlm's package of MiniCPM-o states the same tower, without sounds."""
    size = config["hidden_size"] // config["num_attention_heads"]
    defaults = {"head_dim": size, "rope_theta": 10000.0, "max_position_embeddings": 4096}
    without = {"audio_config": {}, "tts_config": {}, "init_audio": False, "init_tts": False}
    return {**defaults, **config, "model_type": "minicpmo", **without}


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
