"""The models: their sizes, and the configuration that each ships with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foundry.rows import LONG

VOCABULARY = 4096


@dataclass(frozen=True)
class Shape:
    """`config` is what transformers builds the text model from; `extra` is added to the config that is shipped."""

    family: str
    style: str
    config: dict[str, Any]
    extra: dict[str, Any]
    rate: float
    mtp: bool = False
    made_of: str = ""
    """The model that `foundry.mixture` makes it of; the others are trained by `foundry.train`."""


_SHARED = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONG,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
}

EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")

SHAPES = {
    "dense": Shape(
        "qwen3",
        "json",
        {
            **_SHARED,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        {"rope_theta": 1000000.0},
        rate=2e-3,
    ),
    "draft": Shape(
        "qwen3",
        "json",
        {
            **_SHARED,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        {"rope_theta": 1000000.0},
        rate=3e-3,
    ),
    "window": Shape(
        "gemma3_text",
        "json",
        {
            **_SHARED,
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 3},
        rate=2e-3,
    ),
    "hybrid": Shape(
        "qwen3_5_text",
        "xml",
        {
            **_SHARED,
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            },
        },
        {"full_attention_interval": 4, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        rate=1.5e-3,
        mtp=True,
    ),
    "mixture": Shape(
        "qwen3_moe",
        "json",
        {
            **_SHARED,
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 64,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        {
            "rope_theta": 1000000.0,
            "quantization": {
                "group_size": 64,
                "bits": 8,
                **{
                    f"model.layers.{layer}.mlp.switch_mlp.{part}": {"group_size": 64, "bits": 4}
                    for layer in range(4)
                    for part in EXPERT_PARTS
                },
            },
        },
        rate=6e-4,
        made_of="dense",
    ),
}
