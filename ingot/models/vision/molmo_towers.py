"""The vision towers of Molmo, and its language model, which is Qwen's or OLMo's under names of its own.

A transformer sees the whole image on a square, and overlapping crops of a canvas. The states behind two of its layers
are pooled by attention, block by block of the canvas, and are added to the embeddings of their tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.errors import ModelError
from ingot.kernels.device import Device
from ingot.media.image_processors import MOLMO_POOLED, MolmoProcessor
from ingot.media.images import BILINEAR, BILINEAR_UNFILTERED, Pixels, View
from ingot.media.layout import Layout, Size
from ingot.media.processor_parts import ProcessorFiles
from ingot.models.vision.qwen import CLIP_NORMALIZATION
from ingot.models.vision.tiles import PixelNormalization, TiledVisionTower, on_canvas
from ingot.models.vision.tower import LanguagePart, PixelArray
from ingot.models.vision.vit import Vit, VitLayer, WorkSlicing, joint_projection_of

MOLMO_PARTS: Final = ("vision_tower",)
MOLMO_SIZES: Final = {
    "d_model": ("hidden_size", 3584),
    "n_heads": ("num_attention_heads", 28),
    "n_kv_heads": ("num_key_value_heads", 4),
    "n_layers": ("num_hidden_layers", 28),
    "mlp_hidden_size": ("intermediate_size", 37888),  # of the gate and the upward part together
    "vocab_size": ("vocab_size", 152064),
    "embedding_size": ("embedding_size", 152064),
    "additional_vocab_size": ("additional_vocab_size", 128),
    "layer_norm_eps": ("layer_norm_eps", 1e-5),
    "rope_theta": ("rope_theta", 1000000.0),
    "max_position_embeddings": ("max_position_embeddings", 4096),
    "qkv_bias": ("qkv_bias", True),
    "norm_after": ("norm_after", False),
}
"""By mlx-vlm's names, those of the makers and what mlx-vlm has by default."""
BLACK: Final = 0


def _molmo_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The makers' config states all at its top; mlx-vlm's in parts."""
    inside = config.get("text_config") or {}
    found = {name: config.get(stated, inside.get(name, default)) for name, (stated, default) in MOLMO_SIZES.items()}
    instead = {"n_kv_heads": "n_heads", "embedding_size": "vocab_size"}
    return {**found, **{name: found[other] for name, other in instead.items() if not found[name]}}


def molmo_stated(config: dict[str, Any]) -> dict[str, Any]:
    """The config in parts, as mlx-vlm takes it."""
    own = _molmo_sizes(config)
    vision = {"d_model": own["d_model"], "hidden_size": own["mlp_hidden_size"] // 2}
    return {
        **config,
        "text_config": {**(config.get("text_config") or {}), **own},
        "vision_config": {**vision, **(config.get("vision_config") or {})},
    }


def molmo_language(config: dict[str, Any]) -> dict[str, Any]:
    """The config of its language model as mlx-lm's: Qwen 2's, or OLMo 2's, which norms what its parts give. Raises
    ModelError for a mixture of experts."""
    if config.get("moe_num_experts"):
        raise ModelError("Molmo with experts (moe_num_experts) is not supported: models without are.")
    own = _molmo_sizes(config)
    if not own["norm_after"] and not own["qkv_bias"]:
        raise ModelError("Molmo with qkv_bias false is not supported unless norm_after is true.")
    return {
        "model_type": "olmo2" if own["norm_after"] else "qwen2",
        "hidden_size": own["d_model"],
        "num_attention_heads": own["n_heads"],
        "num_key_value_heads": own["n_kv_heads"],
        "head_dim": own["d_model"] // own["n_heads"],
        "num_hidden_layers": own["n_layers"],
        "intermediate_size": own["mlp_hidden_size"] // 2,
        "rms_norm_eps": own["layer_norm_eps"],
        "rope_theta": own["rope_theta"],
        "max_position_embeddings": own["max_position_embeddings"],
        "vocab_size": own["embedding_size"] + own["additional_vocab_size"],
        "tie_word_embeddings": False,
    }


_NAMES: Final = {
    "attn_out": "self_attn.o_proj",
    "ff_out": "mlp.down_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
}
_NAMES_AFTER: Final = {"attn_norm": "post_attention_layernorm", "ff_norm": "post_feedforward_layernorm"}
_WHOLE: Final = {"ln_f": "model.norm", "ff_out": "lm_head", "lm_head": "lm_head"}


def molmo_parted(weights: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Weights by mlx-lm's names: joint projections are split, and both tables of tokens joined."""
    after = config["model_type"] == "olmo2"
    names = {**_NAMES, **(_NAMES_AFTER if after else {})}
    size = config["head_dim"]
    heads, groups = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    found: dict[str, Any] = {}
    for name, weight in weights.items():
        path, _, kind = name.rpartition(".")
        block = re.fullmatch(r"blocks\.(\d+)\.(?:self_attn\.|mlp\.)?(\w+)", path)
        if block is None:
            if path in _WHOLE:
                found[f"{_WHOLE[path]}.{kind}"] = weight
            continue
        inside, part = f"model.layers.{block[1]}", block[2]
        if part == "att_proj":
            for own, rows in zip("qkv", mx.split(weight, [heads, heads + groups]), strict=True):
                found[f"{inside}.self_attn.{own}_proj.{kind}"] = rows
        elif part == "ff_proj":
            for own, rows in zip(("up", "gate"), mx.split(weight, 2), strict=True):
                found[f"{inside}.mlp.{own}_proj.{kind}"] = rows
        elif part in names:
            found[f"{inside}.{names[part]}.{kind}"] = weight
    if "wte.embedding" in weights:
        tables = [weights["wte.embedding"], weights["wte.new_embedding"]]
        found["model.embed_tokens.weight"] = mx.concatenate(tables)
    return found


_PREFIXES: Final = (
    ("model.transformer.", ""),
    ("language_model.model.", ""),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)
MOLMO_LANGUAGE: Final = LanguagePart(None, _PREFIXES, stated=molmo_language, parted=molmo_parted, fewer_scores=True)


def molmo2_language(config: dict[str, Any]) -> dict[str, Any]:
    """The config of Molmo 2's language model as that of Qwen 3. Raises ModelError where it is another one."""
    own = config.get("text_config") or {}
    usual = {"norm_after": False, "qkv_bias": False, "use_qk_norm": True, "qk_norm_type": "qwen3"}
    for name, value in {**usual, "rope_scaling_layers": None}.items():
        if own.get(name, value) != value:
            raise ModelError(f"Molmo 2 with {name} {own[name]} is not supported: {value} is.")
    return {
        **own,
        "model_type": "qwen3",
        "rms_norm_eps": own.get("layer_norm_eps", own.get("rms_norm_eps", 1e-6)),
        "vocab_size": own["vocab_size"] + int(own.get("additional_vocab_size", 128)),
        "tie_word_embeddings": False,
    }


MOLMO2_LANGUAGE: Final = LanguagePart(None, _PREFIXES, stated=molmo2_language, parted=molmo_parted, fewer_scores=True)


def molmo_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """Raises ModelError where the config selects another pooling, or other padding."""
    vision = model.vision_tower
    stated, own = vision.config, vision.image_vit
    rules = MolmoProcessor.of(files)
    normal = PixelNormalization.stated(files.image_config, *CLIP_NORMALIZATION, resample=BILINEAR)
    padding, pooling = stated.image_padding_embed, stated.image_pooling_2d
    if (padding, pooling) != ("pad_and_partial_pad", "attention-meanq"):
        raise ModelError(f"image_padding_embed {padding} with image_pooling_2d {pooling} is not supported.")
    behind = _behind(stated.vit_layers, stated.image_num_layers)
    _check_positions(own.positional_embedding.shape[0] - 1, rules)
    further = stated.intermediate_size - 3 * rules.patch**2  # what packed weights have no fewer of
    vit = Vit(
        own.patch_embedding,
        [_layer(layer) for layer in own.transformer.resblocks[: max(behind)]],
        stated.image_num_heads,
        WorkSlicing.on(device),
        positions=own.positional_embedding,
        first=own.class_embedding,
        before=(lambda rows: mx.pad(rows, [(0, 0), (0, further)], mode="edge")) if further else None,
        opening=own.pre_ln,
        gathered=behind,
    )

    def views(size: Size, layout: Layout) -> Sequence[View]:
        return (rules.fit(size, Size(rules.side, rules.side)),), (layout.size,)

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        yield normal(on_canvas(frames[0], Size(rules.side, rules.side), BLACK))
        yield from crops(normal(on_canvas(frames[1], _canvas(rules, layout), BLACK)), rules, layout)

    def arrange(states: mx.array, layout: Layout) -> mx.array:
        """Patches of black edges have an embedding of their own, and so have those that are partly black."""
        black = _black(rules, layout)
        for number, pads in enumerate((black == 1, (black > 0) & (black < 1))):
            own = mx.array(pads.reshape(-1, 1)).astype(states.dtype)
            states = states + own * vision.pad_embed[number].astype(states.dtype)
        return _blocks(states, _numbers_of(rules, layout))

    def project(rows: mx.array) -> mx.array:
        blocks = rows.reshape(rows.shape[0], MOLMO_POOLED**2, -1)
        pooled = vision.image_pooling_2d(blocks.mean(axis=1, keepdims=True), blocks)
        projected: mx.array = vision.image_projector(pooled[:, 0])
        return projected

    return TiledVisionTower(
        vit,
        (vision,),
        rules.patch,
        int(stated.d_model),
        normal,
        views=views,
        cut=cut,
        gather=lambda states, grid: states[:, 1:],
        arrange=arrange,
        project=project,
        added=True,
    )


def molmo2_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """What is not there of a block at the canvas's edge is left out of its pooling."""
    vision = model.vision_tower
    stated, adapter, own = vision.vit_config, vision.adapter_config, vision.image_vit
    rules = MolmoProcessor.of_2(files)
    normal = replace(PixelNormalization.stated(files.image_config), resample=BILINEAR_UNFILTERED)
    _check_positions(own.positional_embedding.shape[0], rules)
    # Layers are numbered from the end of all that the config states, of which checkpoints leave out the last.
    whole = config.get("vit_config") or (config.get("vision_config") or {}).get("vit_config") or {}
    behind = _behind(adapter.vit_layers, int(whole.get("num_hidden_layers", stated.num_hidden_layers)))
    vit = Vit(
        own.patch_embedding,
        [_layer(layer) for layer in own.transformer[: max(behind)]],
        stated.num_attention_heads,
        WorkSlicing.on(device),
        positions=own.positional_embedding,
        gathered=behind,
    )

    def views(size: Size, layout: Layout) -> Sequence[View]:
        return (Size(rules.side, rules.side),), (layout.size,)

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        yield normal(frames[0])
        yield from crops(normal(frames[1]), rules, layout)

    def arrange(states: mx.array, layout: Layout) -> mx.array:
        """With a number behind each block for each of its patches: whether it is there."""
        numbers = _numbers_of(rules, layout)
        there = mx.array(numbers >= 0).astype(states.dtype)
        blocks = _blocks(states, np.maximum(numbers, 0)).reshape(*numbers.shape, -1) * there[..., None]
        return mx.concatenate([blocks.reshape(numbers.shape[0], -1), there], axis=-1)

    def project(rows: mx.array) -> mx.array:
        count = MOLMO_POOLED**2
        there, blocks = rows[:, -count:], rows[:, :-count].reshape(rows.shape[0], count, -1)
        masked = adapter.pooling_attention_mask
        shares = there.sum(axis=-1)[:, None, None] if masked else count
        pooled = vision.image_pooling_2d(
            blocks.sum(axis=1, keepdims=True) / shares, blocks, attn_mask=(there > 0)[:, None, None] if masked else None
        )
        projected: mx.array = vision.image_projector(pooled[:, 0])
        return projected

    return TiledVisionTower(
        vit,
        (vision,),
        rules.patch,
        int(adapter.text_hidden_size),
        normal,
        views=views,
        cut=cut,
        arrange=arrange,
        project=project,
        bidirectional=True,
        added=True,
    )


def _check_positions(learned: int, rules: MolmoProcessor) -> None:
    """Raises ModelError where a crop has other patches than there are learned positions."""
    if learned != rules.along**2:
        raise ModelError(f"{learned} learned positions for crops of {rules.along} by {rules.along} are not supported.")


def _behind(stated: Sequence[int], layers: int) -> tuple[int, ...]:
    """How many layers the states are behind that a checkpoint numbers from the first layer, or from the end."""
    return tuple(1 + number % layers for number in stated)


def _layer(layer: Any) -> VitLayer:
    own = layer.attention
    return VitLayer(
        layer.attention_norm, joint_projection_of(own.wq, own.wk, own.wv), own.wo, layer.ffn_norm, layer.feed_forward
    )


def _canvas(rules: MolmoProcessor, layout: Layout) -> Size:
    assert layout.arranged is not None, "an image has columns and rows of crops"
    return Size(*(rules.patch * count for count in rules.canvas(layout.arranged)))


def crops(canvas: PixelArray, rules: MolmoProcessor, layout: Layout) -> Iterator[PixelArray]:
    """Row by row."""
    assert layout.arranged is not None, "an image has columns and rows of crops"
    step = rules.side - sum(rules.margins) * rules.patch
    columns, rows = layout.arranged
    for top in range(0, rows * step, step):
        for left in range(0, columns * step, step):
            yield canvas[top : top + rules.side, left : left + rules.side]


def _black(rules: MolmoProcessor, layout: Layout) -> NDArray[np.float32]:
    """[tiles, patches]: how much of each patch is no part of the image, as its makers count it. What they find for a
    crop they say of the tile before it, of which the first is the whole image, and that the last one is partly black.
    Models have learned it so."""
    canvas = _canvas(rules, layout)
    shown = np.ones((layout.size.height, layout.size.width, 1), dtype=np.uint8)
    covered = on_canvas(np.broadcast_to(shown, (*shown.shape[:2], 3)), canvas, BLACK)[..., :1].astype(np.float32)
    along, patch = rules.along, rules.patch
    found = [
        1 - tile.reshape(along, patch, along, patch).mean(axis=(1, 3)).reshape(-1)
        for tile in crops(covered, rules, layout)
    ]
    return np.stack([*found, np.full(along**2, 0.5, dtype=np.float32)])


def _numbers_of(rules: MolmoProcessor, layout: Layout) -> NDArray[np.int32]:
    assert layout.arranged is not None, "an image has columns and rows of crops"
    return _block_numbers(layout.arranged, rules.along, rules.margins)


def _blocks(states: mx.array, numbers: NDArray[np.int32]) -> mx.array:
    """[features, patches of a block * numbers], of the whole image and then of the canvas."""
    return states[mx.array(numbers)].reshape(numbers.shape[0], -1)


@lru_cache(maxsize=32)
def _block_numbers(arranged: Size, along: int, margins: tuple[int, int]) -> NDArray[np.int32]:
    """[features, patches of a block]: the numbers of patches among those of all tiles; none has the number -1. Each
    patch of the canvas is one of the crop that has it farther from its edge."""
    (columns, rows), (left, right) = arranged, margins
    window, each = along - left - right, np.arange(along**2, dtype=np.int32).reshape(along, along)
    canvas = np.full((rows * window + left + right, columns * window + left + right), -1, dtype=np.int32)
    for row in range(rows):
        for column in range(columns):
            own = each + (1 + row * columns + column) * along**2
            down = slice(left if row else 0, along - (right if row < rows - 1 else 0))
            across = slice(left if column else 0, along - (right if column < columns - 1 else 0))
            top, start = row * window, column * window
            canvas[top + down.start : top + down.stop, start + across.start : start + across.stop] = own[down, across]
    return np.concatenate([_pooled(each), _pooled(canvas)])


def _pooled(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """[blocks, patches of a block], row by row."""
    height, width = (-(-count // MOLMO_POOLED) for count in numbers.shape)
    padding = [(0, MOLMO_POOLED * new - old) for new, old in zip((height, width), numbers.shape, strict=True)]
    whole = np.pad(numbers, padding, constant_values=-1)
    blocks = whole.reshape(height, MOLMO_POOLED, width, MOLMO_POOLED).transpose(0, 2, 1, 3)
    return blocks.reshape(height * width, -1)
