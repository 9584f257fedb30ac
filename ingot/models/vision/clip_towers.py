"""The vision towers of LLaVA 1.5 and 1.6, Phi 3.5 and Pixtral (Mistral 3), whose colours are normalised as CLIP's.

LLaVA: CLIP or SigLIP; 1.5 on a square out of the image's middle, 1.6 on the whole image as a square and on tiles of it
on a canvas. Phi 3.5: CLIP on tiles of an image that is padded to them, and on the whole. Lines of those tiles' features
end in one of their own. Pixtral: images of any shape, whose patches are rotated by row and column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.media.images import BILINEAR, Pixels, View
from ingot.media.layout import Layout, Size
from ingot.media.processor_parts import ProcessorFiles, config_side
from ingot.models.vision.qwen import CLIP_NORMALIZATION
from ingot.models.vision.tiles import (
    CutTiles,
    MakeViews,
    PixelNormalization,
    TiledVisionTower,
    cut_square_tiles,
    on_canvas,
    resize_bicubic,
    single_view,
    tile_lines,
    with_line_ends,
)
from ingot.models.vision.tower import BARE_PREFIXES, LANGUAGE_PREFIXES, LanguagePart, PixelArray
from ingot.models.vision.vit import (
    RowFunction,
    Vit,
    VitLayer,
    VitRotation,
    WorkSlicing,
    clip_vit,
    joint_projection_of,
    layers_up_to,
    merge_patches,
)

LLAVA_PARTS: Final = ("vision_tower", "multi_modal_projector")
BLACK: Final = 0
LLAVA_LINE_END: Final = "image_newline"
LLAVA_LANGUAGE: Final = LanguagePart(None, LANGUAGE_PREFIXES)


def llava_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    normal = PixelNormalization.stated(files.image_config, *CLIP_NORMALIZATION)
    whole = model.config.vision_config.image_size
    shorter = config_side(files.image_config, "size", whole) if files.image_config.get("do_center_crop", True) else None

    def views(size: Size, layout: Layout) -> Sequence[View]:
        return single_view(size, layout) if shorter is None else ((scale_to_shorter_side(size, shorter),),)

    def cut(frames: Sequence[Pixels], layout: Layout) -> list[PixelArray]:
        return [normal(center_crop(frames[0], layout.size))]

    return _llava_tower(model, device, views, cut, normal)


def llava_next_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """Raises ModelError where the config selects features that are not of the canvas."""
    if model.config.vision_feature_select_strategy != "default":
        raise ModelError("vision_feature_select_strategy other than default is not supported: tiles have no class.")
    normal = PixelNormalization.stated(files.image_config, *CLIP_NORMALIZATION)

    def side_of(layout: Layout) -> int:
        return int(layout.grid.h * model.config.vision_config.patch_size)

    def views(size: Size, layout: Layout) -> Sequence[View]:
        whole = Size(side_of(layout), side_of(layout))
        return ((whole,),) if layout.covered is None else ((whole,), (fit_within(size, layout.size),))

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        side = side_of(layout)
        yield normal(frames[0])
        if layout.covered is not None:
            canvas = on_canvas(frames[1], layout.size, BLACK)
            yield from map(normal, cut_square_tiles(canvas, side))

    def covered_lines(features: mx.array, layout: Layout) -> mx.array:
        if layout.covered is None:
            return features
        tiles, along = layout.grid.t, layout.grid.h
        each = features.shape[0] // tiles
        columns = layout.size.width // (along * model.config.vision_config.patch_size)
        lines = tile_lines(features[each:], columns, along)
        top, left = (lines.shape[0] - layout.covered.height) // 2, (lines.shape[1] - layout.covered.width) // 2
        covered = lines[top : top + layout.covered.height, left : left + layout.covered.width]
        return mx.concatenate([features[:each], with_line_ends(covered, model[LLAVA_LINE_END])])

    return replace(_llava_tower(model, device, views, cut, normal), finish=covered_lines)


def _llava_tower(
    model: Any, device: Device, views: MakeViews, cut: CutTiles, normal: PixelNormalization
) -> TiledVisionTower:
    vision, stated = model.vision_tower.vision_model, model.config.vision_config
    layers = layers_up_to(vision.encoder.layers, model.config.vision_feature_layer)
    is_clip = stated.model_type == "clip_vision_model"
    ahead = {"first": vision.embeddings.class_embedding, "opening": vision.pre_layrnorm} if is_clip else {}
    vit = clip_vit(vision, layers, stated.num_attention_heads, device, **ahead)
    # "default" leaves out the first row, also where it is no class: as mlx-vlm and transformers do.
    begin = 1 if model.config.vision_feature_select_strategy == "default" else 0

    return TiledVisionTower(
        vit,
        (model.vision_tower, model.multi_modal_projector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        normal,
        views=views,
        cut=cut,
        gather=lambda states, grid: states[:, begin:],
        project=model.multi_modal_projector,
    )


def scale_to_shorter_side(size: Size, shorter: int) -> Size:
    """With a shorter side of this many pixels."""
    width, height = size
    return Size(shorter, shorter * height // width) if width <= height else Size(shorter * width // height, shorter)


def center_crop(frame: Pixels, size: Size) -> Pixels:
    top, left = (frame.shape[0] - size.height) // 2, (frame.shape[1] - size.width) // 2
    return frame[top : top + size.height, left : left + size.width]


def fit_within(size: Size, canvas: Size) -> Size:
    """The largest size that fits on a canvas."""
    across, down = canvas.width / size.width, canvas.height / size.height
    if across < down:
        return Size(canvas.width, min(math.ceil(size.height * across), canvas.height))
    return Size(min(math.ceil(size.width * down), canvas.width), canvas.height)


PHI_PARTS: Final = ("model.vision_embed_tokens",)
PHI_TILE: Final = 336
PHI_MERGE: Final = 2
WHITE: Final = 255
PHI_LANGUAGE: Final = LanguagePart("phi3", BARE_PREFIXES, None)


def phi3_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    vision_encoder = model.model.vision_embed_tokens
    vision = vision_encoder.img_processor.vision_model
    stated, layers = vision.embeddings.config, vision.encoder.layers[:-1]
    ahead = {"first": vision.embeddings.class_embedding, "opening": vision.pre_layrnorm}
    vit = clip_vit(vision, layers, stated.num_attention_heads, device, **ahead)
    normal = PixelNormalization.stated(files.image_config, *CLIP_NORMALIZATION)

    def views(size: Size, layout: Layout) -> Sequence[View]:
        return ((fill_canvas(size, layout.size),),)

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        whole = normal(on_canvas(frames[0], layout.size, WHITE))
        yield resize_bicubic(whole, Size(PHI_TILE, PHI_TILE))
        yield from cut_square_tiles(whole, PHI_TILE)

    def arrange(features: mx.array, layout: Layout) -> mx.array:
        along, numbers = layout.grid.h // PHI_MERGE, features.shape[-1]
        parts = tile_lines(features[along**2 :], layout.size.width // PHI_TILE, along), features[: along**2]
        tiles, whole = (
            with_line_ends(part.reshape(-1, columns, numbers), vision_encoder.sub_GN)
            for part, columns in zip(parts, (parts[0].shape[1], along), strict=True)
        )
        return mx.concatenate([tiles, vision_encoder.glb_GN.reshape(1, numbers).astype(features.dtype), whole])

    def project(rows: mx.array) -> mx.array:
        for layer in vision_encoder.img_projection:
            rows = layer(rows)
        return rows

    return TiledVisionTower(
        vit,
        (vision_encoder,),
        stated.patch_size,
        int(config["hidden_size"]),
        replace(normal, resample=BILINEAR),
        views=views,
        cut=cut,
        gather=lambda states, grid: merge_patches(states[:, 1:], grid, PHI_MERGE),
        project=project,
        arrange=arrange,
    )


def fill_canvas(size: Size, canvas: Size) -> Size:
    """The size whose longer side fills the canvas."""
    along = max(canvas)
    across = max(1, int(along / size.aspect))
    return Size(along, across) if size.width >= size.height else Size(across, along)


PIXTRAL_PARTS: Final = ("vision_tower", "multi_modal_projector")


def pixtral_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    vision, stated = model.vision_tower.vision_model, model.config.vision_config
    layers = layers_up_to(vision.transformer.layers, model.config.vision_feature_layer)
    vit = Vit(
        vision.patch_conv,
        [_pixtral_layer(layer) for layer in layers],
        stated.num_attention_heads,
        WorkSlicing.on(device),
        opening=vision.ln_pre,
    )
    merge, project = _pixtral_merging(model.multi_modal_projector)

    return TiledVisionTower(
        vit,
        (model.vision_tower, model.multi_modal_projector),
        stated.patch_size,
        int(model.config.text_config.hidden_size),
        PixelNormalization.stated(files.image_config, *CLIP_NORMALIZATION),
        gather=lambda states, grid: merge_patches(states, grid, merge),
        project=project,
        rotation=lambda grid: pixtral_rotation(grid.h, grid.w, stated.head_dim, stated.rope_theta),
    )


def _pixtral_layer(layer: Any) -> VitLayer:
    own = layer.attention
    return VitLayer(
        layer.attention_norm,
        joint_projection_of(own.q_proj, own.k_proj, own.v_proj),
        own.o_proj,
        layer.ffn_norm,
        layer.feed_forward,
    )


def _pixtral_merging(projector: Any) -> tuple[int, RowFunction]:
    """The side of the blocks of patches that become a feature, and the projection. Mistral 3 norms each patch first."""

    def project_merged(rows: mx.array) -> mx.array:
        projected: mx.array = projector.linear_2(projector.gelu(projector.linear_1(rows)))
        return projected

    if "patch_merger" not in projector:
        return 1, project_merged
    merger = projector.patch_merger
    along = merger.spatial_merge_size

    def project(rows: mx.array) -> mx.array:
        count, numbers = rows.shape
        normed = projector.norm(rows.reshape(count, along * along, -1))
        # Its weights are of torch's unfold, in which channels come first.
        return project_merged(merger.merging_layer(normed.swapaxes(1, 2).reshape(count, numbers)))

    return along, project


@lru_cache(maxsize=8)
def pixtral_rotation(rows: int, columns: int, size: int, theta: float) -> VitRotation:
    """Every second of a head's frequencies rotates by the row, and the others by the column."""
    speeds = 1.0 / theta ** (np.arange(0, size, 2, dtype=np.float32) / size)
    down, across = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    angles = np.concatenate([down.reshape(-1, 1) * speeds[::2], across.reshape(-1, 1) * speeds[1::2]], axis=-1)
    rotated = mx.array(angles.astype(np.float32))[:, None]
    return mx.cos(rotated), mx.sin(rotated)
