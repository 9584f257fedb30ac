"""Tiny models that see, with random weights, as mlx-vlm would save them; and media for them without files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ingot.media.images import BICUBIC, DecodingMemory, Pixels, View, frames_of_parts, render_views
from ingot.media.items import MediaItem
from ingot.media.layout import ImageLayoutOptions, Layout, MediaProcessor, Size, VideoHeader, VideoLayoutOptions
from ingot.media.worker import DecodedPart
from ingot.models.vision.tower import EncodingSlices, VisionFeatures, VisionTower

VOCAB = 128
IMAGE, VIDEO = 120, 121
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_VISION = {"depth": 3, "num_heads": 2, "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
_MARKS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
_SECTIONS = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1]}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        **_TEXT,
        **_MARKS,
        "text_config": {"model_type": "qwen2_vl", **_TEXT, "rope_scaling": _SECTIONS},
        "rope_scaling": _SECTIONS,
        "vision_config": {
            "model_type": "qwen2_vl",
            **_VISION,
            "embed_dim": 32,
            "hidden_size": 32,
            "mlp_ratio": 2,
            "patch_size": 14,
        },
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **_TEXT,
        **_MARKS,
        "text_config": {"model_type": "qwen2_5_vl", **_TEXT, "rope_scaling": _SECTIONS},
        "rope_scaling": _SECTIONS,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            **_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        **_MARKS,
        "text_config": {
            "model_type": "qwen3_vl_text",
            **_TEXT,
            "head_dim": 16,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            **_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "patch_size": 16,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        **_MARKS,
        "text_config": {
            "model_type": "qwen3_5_text",
            **_TEXT,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "type": "default",
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": {
            "model_type": "qwen3_5",
            **_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "patch_size": 16,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
    },
}
MIXTURE = {
    **CONFIGS["qwen3_vl"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **CONFIGS["qwen3_vl"]["text_config"],
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "vision_config": {**CONFIGS["qwen3_vl"]["vision_config"], "model_type": "qwen3_vl_moe"},
}


def saved(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint of a family in `folder`."""
    from ingot.models.vision.loading import mlx_vlm_package, unloaded_mlx_vlm_model

    config = MIXTURE if family == MIXTURE["model_type"] else CONFIGS[family]
    model = unloaded_mlx_vlm_model(mlx_vlm_package(config), config)
    random = np.random.default_rng(seed)
    weights = {}
    for name, weight in tree_flatten(model.parameters()):
        values = random.normal(0, 0.2 if weight.ndim > 1 else 0.05, weight.shape).astype(np.float32)
        weights[name] = mx.array(values + (1 if weight.ndim == 1 and name.endswith("norm.weight") else 0))
    if family == "qwen3_5":
        weights |= _head(weights, random)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    patch = config["vision_config"]["patch_size"]
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3}
    sizes |= {"image_std": [0.5] * 3, "size": {"shortest_edge": 2 * patch * patch, "longest_edge": 256 * patch * patch}}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(sizes))
    return folder


def _head(weights: dict[str, mx.array], random: np.random.Generator) -> dict[str, mx.array]:
    """A head that guesses, whose layer is like the model's second, which attends."""
    begins, size = "language_model.model.layers.1.", _TEXT["hidden_size"]
    named = {name.removeprefix(begins): weight for name, weight in weights.items() if name.startswith(begins)}
    layer = {f"mtp.layers.0.{name}": weight[::-1] for name, weight in named.items()}
    norms = {f"mtp.{name}.weight": mx.ones(size) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return {**layer, **norms, "mtp.fc.weight": mx.array(random.normal(0, 0.2, (size, 2 * size)).astype(np.float32))}


def reference(folder: Path) -> Any:
    """The same checkpoint as mlx-vlm itself loads it, in float32."""
    from ingot.upstream import import_upstream

    model = import_upstream("mlx_vlm.utils").load_model(folder, lazy=True)
    model.set_dtype(mx.float32)
    return model


@dataclass(frozen=True)
class Frames:
    """A source of pixels that has them."""

    pixels: tuple[Pixels, ...]

    @property
    def size(self) -> Size:
        height, width, _ = self.pixels[0].shape if self.pixels else (1, 1, 3)
        return Size(width, height)

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        return DecodingMemory(0, 0, self.size)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        from PIL import Image

        for pixels in self.pixels:
            made = (
                DecodedPart(None, bytearray(data)) for _, data in render_views(Image.fromarray(pixels), views, resample)
            )
            yield from frames_of_parts(made, Size(pixels.shape[1], pixels.shape[0]), views)


def drawn_frame(random: np.random.Generator, width: int, height: int) -> Pixels:
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


def item_at(begin: int, kind: Any, layout: Layout, frames: Sequence[Pixels], gap: int = 3) -> MediaItem:
    """An item whose runs stand `gap` tokens apart."""
    runs, at = [], begin
    for run in layout.runs:
        runs.append((at, at + run))
        at += run + gap
    digest = blake2b(b"".join(frame.tobytes() for frame in frames) + repr(layout).encode(), digest_size=32).digest()
    return MediaItem(kind, digest, tuple(runs), layout, Frames(tuple(frames)))


def prompt_with(
    processor: MediaProcessor, seed: int, shown: Sequence[str], text: int = 5
) -> tuple[list[int], list[MediaItem]]:
    """Random text with pictures and clips in it: their tokens and the items."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    items: list[MediaItem] = []

    def speak(count: int) -> None:
        tokens.extend(int(token) for token in random.integers(1, 100, count))

    for kind in shown:
        speak(int(random.integers(1, text + 1)))
        width, height = (int(side) for side in random.integers(40, 140, 2))
        if kind == "image":
            layout = processor.image_layout(Size(width, height), ImageLayoutOptions())
            frames = [drawn_frame(random, width, height)]
        else:
            layout = processor.video_layout(VideoHeader(Size(width, height), 6, 2.0), VideoLayoutOptions(frames=4))
            frames = [drawn_frame(random, width, height) for _ in layout.frames]
        speak(layout.around[0])
        item = item_at(len(tokens), kind, layout, frames)
        for begin, end in item.runs:
            speak(begin - len(tokens))
            tokens.extend([IMAGE if kind == "image" else VIDEO] * (end - begin))
        speak(layout.around[1])
        items.append(item)
    speak(text)
    return tokens, items


def finished(work: EncodingSlices) -> VisionFeatures:
    """What a tower's work gives, every slice evaluated in turn."""
    try:
        while True:
            mx.eval(*next(work))
    except StopIteration as done:
        features: VisionFeatures = done.value
        return features


def looked(tower: VisionTower, item: MediaItem) -> VisionFeatures:
    return finished(tower.encode(tower.pixels(item), item.layout))
