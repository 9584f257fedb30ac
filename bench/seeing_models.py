"""Vision models with random weights: a tower of a published size and a small language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.random_models import write_tokenizer

VOCAB = 512
IMAGE, VIDEO = 500, 501
TOWERS: dict[str, dict[str, int]] = {
    "siglip": {"hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "depth": 27},
    "qwen": {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "depth": 24},
    "tiny": {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 2},
}
"""SigLIP so400m, which Gemma 3 and Qwen 3 VL of 8B see with, and Qwen 3 VL's of 2B. All in Qwen 3 VL's form."""
_TEXT = {
    "model_type": "qwen3_vl_text",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
}


def config_of(tower: str, depth: int | None = None) -> dict[str, Any]:
    """`depth`: so many of the tower's layers, which are all alike."""
    vision = {
        "model_type": "qwen3_vl",
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": _TEXT["hidden_size"],
        "deepstack_visual_indexes": [],
        **TOWERS[tower],
    }
    vision["depth"] = depth or vision["depth"]
    marks = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 502, "vision_end_token_id": 503}
    return {"model_type": "qwen3_vl", **marks, "text_config": _TEXT, "vision_config": vision, "eos_token_id": VOCAB - 1}


def write(folder: Path, tower: str, depth: int | None = None) -> None:
    """A checkpoint of such a model, in 16 bits, as most are."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from ingot.models.vision.loading import mlx_vlm_package, unloaded_mlx_vlm_model

    config = config_of(tower, depth)
    model = unloaded_mlx_vlm_model(mlx_vlm_package(config), config)
    mx.random.seed(0)
    weights = {
        name: (mx.ones(weight.shape) if weight.ndim == 1 else 0.05 * mx.random.normal(weight.shape)).astype(mx.bfloat16)
        for name, weight in tree_flatten(model.parameters())
    }
    write_tokenizer(folder, VOCAB)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    rules = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3}
    rules |= {"image_std": [0.5] * 3, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(rules))
