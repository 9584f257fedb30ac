"""Tiny models that see in tiles, with random weights, as mlx-vlm would save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ingot.models.vision.loading import mlx_vlm_package, unloaded_mlx_vlm_model

VOCAB, IMAGE = 128, 120
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
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
    "patch_size": 8,
    "image_size": 64,
    "layer_norm_eps": 1e-6,
}
_MARKS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "pad_token_id": 0,
}
_ROTARY = {"head_dim": 16, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "image_size": 128}

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3",
        **_MARKS,
        "mm_tokens_per_image": 16,
        "text_config": {
            "model_type": "gemma3_text",
            **{name: value for name, value in _TEXT.items() if name != "rope_theta"},
            "num_hidden_layers": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "sliding_window_pattern": 3,
            "mm_tokens_per_image": 16,
        },
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
    },
    "llava": {
        "model_type": "llava",
        **_MARKS,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
    },
    "idefics3": {
        "model_type": "idefics3",
        **_MARKS,
        "scale_factor": 2,
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "idefics3", **_VISION},
    },
    "smolvlm": {
        "model_type": "smolvlm",
        **_MARKS,
        "scale_factor": 4,
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "smolvlm_vision", **_VISION},
    },
    "pixtral": {
        "model_type": "pixtral",
        **_MARKS,
        "vision_feature_layer": -1,
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8},
        "vision_config": {"model_type": "pixtral", **_VISION, **_ROTARY},
    },
    "mistral3": {
        "model_type": "mistral3",
        **_MARKS,
        "vision_feature_layer": -1,
        "spatial_merge_size": 2,
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8},
        "vision_config": {"model_type": "pixtral", **_VISION, **_ROTARY},
    },
    "internvl": {
        "model_type": "internvl",
        **_MARKS,
        "downsample_ratio": 0.5,
        "text_config": {"model_type": "qwen3", **_TEXT, "head_dim": 8},
        "vision_config": {"model_type": "internvl_vision", **_VISION, "layer_scale_init_value": 0.5},
    },
    "internvl_chat": {
        "model_type": "internvl_chat",
        **_MARKS,
        "downsample_ratio": 0.5,
        "llm_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {"model_type": "intern_vit_6b", **_VISION, "qk_normalization": True},
    },
}
UNLIKE: dict[str, dict[str, Any]] = {
    "llava_next": {
        **CONFIGS["llava"],
        "model_type": "llava_next",
        "image_grid_pinpoints": [[64, 128], [128, 64], [128, 128], [64, 192]],
    }
}
"""Whose features mlx-vlm arranges otherwise than their makers."""
_COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
FILES: dict[str, dict[str, Any]] = {
    "gemma3": {"size": {"height": 64, "width": 64}, "resample": 2, "image_seq_length": 16},
    "llava": {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}, "resample": 3},
    "llava_next": {
        "size": {"shortest_edge": 64},
        "crop_size": {"height": 64, "width": 64},
        "resample": 3,
        "image_grid_pinpoints": [[64, 128], [128, 64], [128, 128], [64, 192]],
    },
    "idefics3": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}, "resample": 1},
    "smolvlm": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}, "resample": 1},
    "pixtral": {"size": {"longest_edge": 96}, "patch_size": {"height": 8, "width": 8}, "resample": 3},
    "mistral3": {"size": {"longest_edge": 96}, "patch_size": {"height": 8, "width": 8}, "resample": 3},
    "internvl": {
        "size": {"height": 64, "width": 64},
        "max_patches": 4,
        "crop_to_patches": True,
        "resample": 3,
        **_COLOURS,
    },
    "internvl_chat": {"size": {"height": 64, "width": 64}, "max_patches": 4, "resample": 3},
}


def packed(family: str, folder: Path) -> Path:
    """The same in eight bits, the tower too, as mlx-vlm packs models."""
    saved(family, folder)
    config = CONFIGS[family]
    model = unloaded_mlx_vlm_model(mlx_vlm_package(config), config)
    weights = mx.load(str(folder / "model.safetensors"))
    model.load_weights(list(weights.items()), strict=False)
    nn.quantize(model, group_size=32, bits=8, class_predicate=_packable)
    stored = dict(tree_flatten(model.parameters()))
    if family == "gemma3":
        stored = {name: weight for name, weight in stored.items() if not name.startswith("language_model.lm_head")}
    mx.save_safetensors(str(folder / "model.safetensors"), stored, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 32, "bits": 8}}))
    return folder


def _packable(path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def saved(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint of a family in `folder`."""
    config = (CONFIGS | UNLIKE)[family]
    model = unloaded_mlx_vlm_model(mlx_vlm_package(config), config)
    random = np.random.default_rng(seed)
    weights = {}
    for name, weight in tree_flatten(model.parameters()):
        values = random.normal(0, 0.2 if weight.ndim > 1 else 0.05, weight.shape).astype(np.float32)
        weights[name] = mx.array(values + (1 if "norm" in name and name.endswith("weight") else 0))
    if family == "gemma3":
        del weights["language_model.lm_head.weight"]  # its embeddings are its head
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(FILES[family]))
    return folder
