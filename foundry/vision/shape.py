"""The vision model's sizes, and the configuration that it ships with: Qwen3-VL's, small."""

from __future__ import annotations

from typing import Any

from foundry import vocabulary
from foundry.package import ends
from foundry.shapes import VOCABULARY
from foundry.vision.prompts import END, IMAGE, MERGE, PATCH, START, TEMPORAL, VIDEO

CONTEXT = 1024
RATE = 1e-3
SMALLEST, LARGEST = 32 * 32, 256 * 256
"""Pixels of a picture; others are scaled. The training's lie between them, so that they stay as they are."""


def config() -> dict[str, Any]:
    text = {
        "model_type": "qwen3_vl_text",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": ends()[0],
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
    }
    vision = {
        "model_type": "qwen3_vl",
        "depth": 6,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 192,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [3],
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "image_token_id": _token(IMAGE),
        "video_token_id": _token(VIDEO),
        "vision_start_token_id": _token(START),
        "vision_end_token_id": _token(END),
        "text_config": text,
        "vision_config": vision,
    }


def _token(mark: str) -> int:
    (token,) = vocabulary.encoded(mark)
    return token


def image_processor() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": SMALLEST, "longest_edge": LARGEST},
        **_pixels(),
    }


def video_processor() -> dict[str, Any]:
    """A clip's limits count the pixels of all its frames."""
    return {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 4 * SMALLEST, "longest_edge": 16 * LARGEST},
        "fps": 2,
        "min_frames": 4,
        "max_frames": 32,
        "do_sample_frames": True,
        **_pixels(),
    }


def _pixels() -> dict[str, Any]:
    return {
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL,
        "merge_size": MERGE,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
