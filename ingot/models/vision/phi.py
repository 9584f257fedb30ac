"""Phi 3.5's tower: CLIP on tiles of a picture that is padded to them, and on the whole; lines of features end in one
of their own, and another stands between tiles and whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.media.families.files import ProcessorFiles
from ingot.media.layout import Layout
from ingot.media.picture import Pixels, View
from ingot.media.size import Size
from ingot.models.vision.frames import Normal
from ingot.models.vision.interpolation import bicubic
from ingot.models.vision.language import LanguagePart
from ingot.models.vision.qwen import CLIP
from ingot.models.vision.slicing import Slicing
from ingot.models.vision.tiles import TiledTower, tiles
from ingot.models.vision.tower import PixelArray
from ingot.models.vision.vit import Vit, clip_layer, learned, merged
from ingot.upstream import create_attention_mask

PARTS: Final = ("model.vision_embed_tokens",)
_KEPT: Final = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
SIDE: Final = 336
MERGE: Final = 2
BILINEAR: Final = 2
WHITE: Final = 255


def over_embeddings(model: Any, states: Any, cache: Any) -> Any:
    """As mlx-lm's class runs behind its embeddings."""
    mask = create_attention_mask(states, cache[0])
    for layer, state in zip(model.model.layers, cache, strict=True):
        states = layer(states, mask, state)
    return model.lm_head(model.model.norm(states))


LANGUAGE: Final = LanguagePart("phi3", tuple((name, name) for name in _KEPT), None, over_embeddings)


def phi3_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledTower:
    eyes = model.model.vision_embed_tokens
    vision = eyes.img_processor.vision_model
    embeddings, stated = vision.embeddings, vision.embeddings.config
    vit = Vit(
        embeddings.patch_embedding,
        [clip_layer(layer) for layer in vision.encoder.layers[:-1]],
        stated.num_attention_heads,
        Slicing.on(device),
        positions=learned(embeddings),
        first=embeddings.class_embedding,
        opening=vision.pre_layrnorm,
    )
    normal = Normal.stated(files.pictures, *CLIP)

    def views(size: Size, layout: Layout) -> Sequence[View]:
        return ((filling(size, layout.size),),)

    def cut(shown: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        whole = normal(on_white(shown[0], layout.size))
        yield bicubic(whole, Size(SIDE, SIDE))
        yield from tiles(whole, SIDE)

    def gathered(states: mx.array, layout: Layout) -> mx.array:
        return merged(states[:, 1:], layout, MERGE)

    def arranged(features: mx.array, layout: Layout) -> mx.array:
        along = layout.grid.h // MERGE
        rows, columns = layout.size.height // SIDE, layout.size.width // SIDE
        numbers = features.shape[-1]
        tiled = features[1:].reshape(rows, columns, along, along, numbers).swapaxes(1, 2)
        shapes = ((tiled, rows * along, columns * along), (features[:1], along, along))
        lines = [_lined(part.reshape(high, wide, numbers), eyes.sub_GN) for part, high, wide in shapes]
        return mx.concatenate([lines[0], eyes.glb_GN.reshape(1, numbers).astype(features.dtype), lines[1]])

    def projected(rows: mx.array) -> mx.array:
        for layer in eyes.img_projection:
            rows = layer(rows)
        return rows

    hidden = int(config["hidden_size"])
    return TiledTower(
        vit,
        (eyes,),
        stated.patch_size,
        hidden,
        views=views,
        cut=cut,
        resample=BILINEAR,
        gather=gathered,
        project=projected,
        arrange=arranged,
    )


def _lined(features: mx.array, end: mx.array) -> mx.array:
    """[rows, columns, numbers], with one more at the end of each row, as one list."""
    rows, _, numbers = features.shape
    ends = mx.broadcast_to(end.reshape(1, 1, numbers).astype(features.dtype), (rows, 1, numbers))
    return mx.concatenate([features, ends], axis=1).reshape(-1, numbers)


def filling(size: Size, canvas: Size) -> Size:
    """With a longer side that fills the canvas."""
    along = max(canvas)
    across = max(1, int(along / size.aspect))
    return Size(along, across) if size.width >= size.height else Size(across, along)


def on_white(frame: Pixels, size: Size) -> Pixels:
    """In the middle of a canvas."""
    height, width, _ = frame.shape
    above, before = math.floor((size.height - height) / 2), math.floor((size.width - width) / 2)
    canvas = np.full((size.height, size.width, 3), WHITE, dtype=np.uint8)
    canvas[above : above + height, before : before + width] = frame
    return canvas
