"""What mlx-vlm's own classes make of images that are seen in their own shape, or on a canvas of tiles."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.media.items import MediaItem
from ingot.media.layout import Layout
from ingot.models.adapter import ModelAdapter
from tests.models.vision.tiny_families import FILES


def tiles_of(tower: Any, item: MediaItem) -> list[np.ndarray]:
    """The normalised tiles [height, width, 3] that a tower is given."""
    patches, begin, tiles = tower.pixels(item), 0, []
    side = tower.patch
    for grid in item.layout.grids:
        for _ in range(grid.t):
            own = patches[begin : begin + grid.h * grid.w].reshape(grid.h, grid.w, side, side, 3)
            tiles.append(own.transpose(0, 2, 1, 3, 4).reshape(grid.h * side, grid.w * side, 3))
            begin += grid.h * grid.w
    return tiles


def _colours_first(tiles: list[np.ndarray]) -> mx.array:
    return mx.array(np.stack([tile.transpose(2, 0, 1) for tile in tiles]))


def _gemma3n(model: Any, tiles: list[np.ndarray]) -> mx.array:
    """By rows, as transformers has them, where mlx-vlm's are by columns; and the token behind an image, which mlx-vlm
    embeds with the text."""
    (seen,) = model.vision_tower(_colours_first(tiles)).swapaxes(1, 2)
    width = seen.shape[-1]
    found = model.embed_vision(inputs_embeds=seen.reshape(-1, width) * width**0.5)
    end = model.embed_vision(input_ids=mx.array([model.config.vision_config.vocab_offset]))
    return mx.concatenate([found, end]) * model.config.text_config.hidden_size**-0.5


def _gemma4(model: Any, tiles: list[np.ndarray]) -> mx.array:
    found = model.encode_image((_colours_first(tiles) + 1) / 2)
    return found.reshape(-1, found.shape[-1]) * model.config.text_config.hidden_size**-0.5


def merged_blocks(tile: np.ndarray, patch: int, merge: int = 2) -> np.ndarray:
    """Patches of two frames that are the same, in blocks of `merge` by `merge`."""
    rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
    blocks = tile.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, patch * patch)
    return np.repeat(blocks, 2, axis=2).reshape(rows * columns, -1)


def patches_of(tile: np.ndarray, patch: int) -> np.ndarray:
    """[patches, patch, patch, 3]"""
    rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
    return tile.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4).reshape(-1, patch, patch, 3)


def _glm(model: Any, tiles: list[np.ndarray]) -> mx.array:
    """Blocks of patches lie together, and each is two frames."""
    (tile,), patch = tiles, 8
    rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
    pixels = merged_blocks(tile, patch)
    module = import_module(type(model.vision_tower).__module__)
    with mock.patch.object(module, "grid_sample", _sampled_bicubic, create=True):
        return model.vision_tower(mx.array(pixels), mx.array([[1, rows, columns]]))


def _sampled_bicubic(table: mx.array, grid: mx.array) -> mx.array:
    """As its makers sample learned positions [1, rows, columns, width] at places [1, n, 1, 2]; mlx-vlm does it from two
    by two neighbours, of which those beyond the edges are zeros."""
    learned, places = np.array(table[0]), np.array(grid[0, :, 0])
    found = []
    for x, y in places:
        across, down = ((x + 1) * learned.shape[1] - 1) / 2, ((y + 1) * learned.shape[0] - 1) / 2
        near = [[int(np.floor(at)) + step for step in range(-1, 3)] for at in (down, across)]
        weights = [[_cubic(abs(at - each)) for each in own] for at, own in zip((down, across), near, strict=True)]
        rows, columns = (np.clip(own, 0, most - 1) for own, most in zip(near, learned.shape, strict=False))
        found.append(np.einsum("r,c,rcw->w", *map(np.array, weights), learned[np.ix_(rows, columns)]))
    return mx.array(np.stack(found).astype(np.float32))[None, :, None]


def _resized_bicubic(table: mx.array, size: Any) -> mx.array:
    """The same for [1, width, rows, columns] that become `size`, as torch resizes, where mlx-vlm does it otherwise."""
    (rows, columns), (_, width, *_) = size, table.shape
    down, across = ((np.arange(count) + 0.5) / count * 2 - 1 for count in (rows, columns))
    places = np.stack(np.meshgrid(across, down), axis=-1).reshape(1, -1, 1, 2)
    found = _sampled_bicubic(table.transpose(0, 2, 3, 1), mx.array(places.astype(np.float32)))
    return found.reshape(1, rows, columns, width).transpose(0, 3, 1, 2)


def _cubic(distance: float) -> float:
    if distance <= 1:
        return 1.25 * distance**3 - 2.25 * distance**2 + 1
    return -0.75 * distance**3 + 3.75 * distance**2 - 6 * distance + 3


def _kimi(model: Any, tiles: list[np.ndarray]) -> mx.array:
    (tile,), patch = tiles, 8
    rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
    patches = patches_of(tile, patch)
    module = import_module(type(model.vision_tower).__module__)
    with mock.patch.object(module, "bicubic_interpolate", _resized_bicubic):
        seen = model.vision_tower(mx.array(patches), mx.array([[rows, columns]]))
    found = (model.mm_projector if "mm_projector" in model else model.multi_modal_projector)(seen)
    return found[0] if isinstance(found, list) else found


def _resized_softly(table: mx.array, size: Any, by: str = "BICUBIC") -> mx.array:
    """[1, width, rows, columns], resized as torch does with `antialias`, and as Pillow does."""
    from PIL import Image

    sides = (size[1], size[0])
    found = [Image.fromarray(own).resize(sides, Image.Resampling[by]) for own in np.array(table[0], np.float32)]
    return mx.array(np.stack([np.asarray(own) for own in found]))[None]


def _resized_positions(table: mx.array, side: int) -> mx.array:
    """[1, rows, columns, width]"""
    return _resized_softly(table.transpose(0, 3, 1, 2), (side, side)).transpose(0, 2, 3, 1)


def _distances(queries: int, keys: int, learned: mx.array) -> mx.array:
    """Between the middles of what was learned, where mlx-vlm's are between their beginnings."""
    wanted, there = 2 * queries - 1, learned.shape[0]
    at = (np.arange(wanted) + 0.5) * there / wanted - 0.5
    line = np.stack([np.interp(at, np.arange(there), own) for own in np.array(learned).T], axis=-1).astype(np.float32)
    numbers = np.arange(queries)
    return mx.array(line[numbers[:, None] - numbers[None] + queries - 1])


def _deepseek_ocr(model: Any, tiles: list[np.ndarray], layout: Layout) -> mx.array:
    """CLIP's GELUs are its makers'."""
    *tiled, whole = tiles
    shown = _colours_first(tiled) if tiled else mx.zeros((1, 3, 64, 64))
    shape, count = mx.array([layout.arranged or (1, 1)]), layout.features
    sam, vision = (import_module(type(part).__module__) for part in (model.sam_model, model.vision_model))
    for layer in model.vision_model.transformer.layers:
        layer.mlp.activation_fn = nn.GELU(approx="fast")
    with (
        mock.patch.object(sam, "get_abs_pos_sam", _resized_positions),
        mock.patch.object(sam, "get_rel_pos", _distances),
        mock.patch.object(vision, "interpolate", _resized_softly),
    ):
        return model.get_input_embeddings(
            mx.zeros((1, count), mx.int32), [shown, _colours_first([whole])], shape, mx.ones((1, count))
        ).inputs_embeds[0]


def _resized_linearly(table: mx.array, size: Any) -> mx.array:
    """[1, width, rows, columns], resized as torch and Pillow do."""
    return _resized_softly(table, size, by="BILINEAR")


def _phi4(model: Any, tiles: list[np.ndarray]) -> mx.array:
    """Whose learned positions its makers interpolate linearly."""
    (tile,), patch = tiles, 8
    shape = mx.array([[tile.shape[0] // patch, tile.shape[1] // patch]])
    pixels = mx.array(patches_of(tile, patch).reshape(1, -1, 3 * patch**2))
    module = import_module(type(model.vision_tower.vision_tower).__module__)
    with mock.patch.object(module, "bicubic_interpolate", _resized_linearly):
        seen, _, _ = model.vision_tower(pixels, output_hidden_states=True, spatial_shapes=shape)
    return model.mm_projector(seen[model.config.mm_vision_select_layer])[0]


def _molmo(model: Any, tiles: list[np.ndarray], item: MediaItem) -> mx.array:
    """What its image processor counts as black, and how it orders features, is taken from there."""
    from mlx_vlm.models.molmo.processing_molmo import MolmoImageProcessor

    picture = next(item.source.frames()).astype(np.float32) / 255
    _, _, order, masks = MolmoImageProcessor(**FILES["molmo"]).preprocess(picture, 1, 2, 3, 4)
    pixels = np.stack([patches_of(tile, 8).reshape(-1, 192) for tile in tiles])
    found, _ = model.vision_tower(mx.array(pixels)[None], mx.array(masks)[None])
    places = order.reshape(-1)
    ordered = np.argsort(places, kind="stable")[(places < 0).sum() :]
    return found.reshape(places.size, -1)[mx.array(ordered)]


def _molmo2(model: Any, tiles: list[np.ndarray], item: MediaItem) -> mx.array:
    from mlx_vlm.models.molmo2 import processing

    own = processing.Molmo2ImageProcessor(**FILES["molmo2"])
    pooled = own.preprocess([next(item.source.frames())])["image_token_pooling"]
    pixels = np.stack([patches_of(tile, 8).reshape(-1, 192) for tile in tiles])
    return model.vision_tower(mx.array(pixels)[None], mx.array(pooled)[None])


def _lfm(model: Any, tiles: list[np.ndarray]) -> mx.array:
    patch, shapes, rows = 8, [], []
    for tile in tiles:
        shapes.append((tile.shape[0] // patch, tile.shape[1] // patch))
        rows.append(patches_of(tile, patch).reshape(shapes[-1][0] * shapes[-1][1], -1))
    most = max(len(own) for own in rows)
    pixels = np.stack([np.pad(own, ((0, most - len(own)), (0, 0))) for own in rows])
    mask = np.stack([np.arange(most) < len(own) for own in rows]).astype(np.int32)
    seen = model.encode_images(mx.array(pixels), spatial_shapes=mx.array(shapes), pixel_attention_mask=mx.array(mask))
    return mx.concatenate(list(seen))


def _llama4(model: Any, tiles: list[np.ndarray]) -> mx.array:
    seen = model.vision_model(_colours_first(tiles))
    return model.multi_modal_projector(seen.reshape(-1, seen.shape[-1]))


def _gemma4_unified(model: Any, tiles: list[np.ndarray]) -> mx.array:
    (tile,), patch = tiles, 24
    rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
    down, across = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    places = np.stack([across, down], axis=-1).reshape(1, -1, 2)
    pixels = patches_of(tile, patch).reshape(1, rows * columns, -1)
    found = model.get_image_features(mx.array(pixels), mx.array(places))
    return found * model.config.text_config.hidden_size**-0.5


def _minimax(model: Any, tiles: list[np.ndarray]) -> mx.array:
    (tile,), patch = tiles, 8
    grid = mx.array([[1, tile.shape[0] // patch, tile.shape[1] // patch]])
    return model.encode_image(mx.array(merged_blocks(tile, patch)), grid)


def _minicpm(model: Any, tiles: list[np.ndarray]) -> mx.array:
    sizes = [[tile.shape[0] // 8, tile.shape[1] // 8] for tile in tiles]
    pixels = [[mx.array(tile.transpose(2, 0, 1)) for tile in tiles]]
    found = model.get_vision_embedding(pixels, [np.array(sizes, dtype=np.int32)])[0]
    return found.reshape(-1, found.shape[-1])


def _paddle(model: Any, tiles: list[np.ndarray]) -> mx.array:
    (tile,), patch = tiles, 8
    rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
    patches = patches_of(tile, patch).transpose(0, 3, 1, 2)[None]
    return model.visual(mx.array(patches), mx.array([[1, rows, columns]]))


FEATURES = {
    "deepseekocr": _deepseek_ocr,
    "phi4-siglip": _phi4,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), _glm),
    **dict.fromkeys(("kimi_vl", "kimi_k25"), _kimi),
    "gemma4_unified": _gemma4_unified,
    "minimax_m3_vl": _minimax,
    **dict.fromkeys(("minicpmo", "minicpmv4_6"), _minicpm),
    "lfm2_vl": _lfm,
    "llama4": _llama4,
    "molmo": _molmo,
    "molmo2": _molmo2,
    "paddleocr_vl": _paddle,
}
"""By model_type."""


def features(model: Any, adapter: ModelAdapter, item: MediaItem) -> mx.array:
    further = {"deepseekocr": (item.layout,), "molmo": (item,), "molmo2": (item,)}.get(adapter.family, ())
    found: mx.array = FEATURES[adapter.family](model, tiles_of(adapter.tower, item), *further)
    return found


def logits(model: Any, adapter: ModelAdapter, tokens: list[int], items: list[MediaItem]) -> mx.array:
    """Of mlx-vlm's language model, over features of its own tower."""
    language = model.language_model
    decoder = language.model if "model" in language else language
    embed = decoder.wte if "wte" in decoder else decoder.embed_tokens
    embeds = embed(mx.array([tokens]))
    for item in items:
        at = mx.array([position for begin, end in item.runs for position in range(begin, end)])
        found = features(model, adapter, item)
        embeds[0, at] = embeds[0, at] + found if "wte" in decoder else found
    positions = adapter.tower.positions(len(tokens), items)
    if adapter.family == "gemma3n":
        by_layer = language.model.get_per_layer_inputs(mx.array([tokens]))
        scaled = embeds * model.config.text_config.hidden_size**0.5
        return language(None, inputs_embeds=scaled, per_layer_inputs=by_layer).logits[0]
    if adapter.family.startswith("gemma4"):
        return _gemma4_logits(model, tokens, embeds, items)
    if adapter.family.startswith("minicpm"):  # whose positions of three axes are all alike
        positions = np.broadcast_to(np.arange(len(tokens)), (3, len(tokens)))
        return language(mx.array([tokens]), inputs_embeds=embeds, position_ids=mx.array(positions)[:, None]).logits[0]
    if adapter.family == "molmo2":
        return language(mx.array([tokens]), inputs_embeds=embeds, mask=_mutual_mask(len(tokens), items)).logits[0]
    if positions is None:
        return language(mx.array([tokens]), inputs_embeds=embeds).logits[0]
    cache = [None] * len(language.model.layers)
    states = language.model(None, inputs_embeds=embeds, cache=cache, position_ids=mx.array(positions)[:, None])
    return language.lm_head(states)[0]


def _mutual_mask(count: int, items: list[MediaItem]) -> mx.array:
    """As transformers has it for one image: its tokens, also those that begin and end lines, see each other, where
    mlx-vlm lets each see those before it alone."""
    seen = np.tril(np.ones((count, count), dtype=bool))
    for item in items:
        seen[item.begin : item.end, item.begin : item.end] = True
    return mx.array(seen)[None, None]


def _gemma4_logits(model: Any, tokens: list[int], embeds: mx.array, items: list[MediaItem]) -> mx.array:
    """As transformers has it: an image's tokens see each other in layers with a window alone, where mlx-vlm lets them
    in all, and have no embeddings of their own in each layer."""
    language, text = model.language_model, model.config.text_config
    decoder, shown = language.model, np.zeros(len(tokens), dtype=bool)
    for begin, end in (run for item in items for run in item.runs):
        shown[begin:end] = True
    kinds = mx.array(shown.astype(np.int32))[None]
    masks = type(decoder)._make_masks

    def own_masks(h: mx.array, cache: Any, mm_token_type_ids: Any = None) -> list[Any]:
        causal, mutual = masks(decoder, h, cache, None), masks(decoder, h, cache, kinds)
        by_kind = {"full_attention": causal, "sliding_attention": mutual}
        return [by_kind[kind][number] for number, kind in enumerate(text.layer_types)]

    object.__setattr__(decoder, "_make_masks", own_masks)
    options: dict[str, Any] = {}
    if text.hidden_size_per_layer_input:
        plain = mx.where(kinds == 1, text.pad_token_id, mx.array([tokens]))
        options["per_layer_inputs"] = decoder.get_per_layer_inputs(plain)
    scaled = embeds * text.hidden_size**0.5
    return language(None, inputs_embeds=scaled, **options).logits[0]
