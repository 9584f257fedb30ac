"""Tiny random-weight models, one for each kind of layer, built from mlx-lm's own model definitions."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from bench import random_models
from ingot.kernels.device import Device

VOCAB = 96

_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
}

# Heads of the "kernel" kinds are as large as a GPU's kernels take.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHARED},
    "single": {"model_type": "llama", **_SHARED, "num_key_value_heads": 1},
    "tied": {"model_type": "qwen3", **_SHARED, "tie_word_embeddings": True},
    "window": {
        "model_type": "gemma3_text",
        **_SHARED,
        "num_hidden_layers": 4,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 8,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
    },
    "hybrid": {
        "model_type": "qwen3_5_text",
        **_SHARED,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "kernel": {"model_type": "qwen3", **_SHARED, "num_hidden_layers": 2, "head_dim": 16},
    # Its layers are one graph on CUDA.
    "kernel-packed": {
        "model_type": "qwen3",
        **_SHARED,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "quantization": {"group_size": 32, "bits": 8},
    },
    "kernel-32": {"model_type": "qwen3", **_SHARED, "num_hidden_layers": 2, "head_dim": 32},
    "kernel-window": {
        "model_type": "gemma3_text",
        **_SHARED,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
    },
    # Its layers are one graph, too.
    "kernel-window-packed": {
        "model_type": "gemma3_text",
        **_SHARED,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "intermediate_size": 64,
        "rope_local_base_freq": 1000.0,
        "query_pre_attn_scalar": 16,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "quantization": {"group_size": 32, "bits": 8},
    },
    "kernel-hybrid": {
        "model_type": "qwen3_5_text",
        **_SHARED,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "kernel-hybrid-packed": {
        "model_type": "qwen3_5_text",
        **_SHARED,
        "head_dim": 16,
        "intermediate_size": 64,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "quantization": {"group_size": 32, "bits": 8},
    },
    # Mamba 2, attention without positions, and MLPs without gates, each a layer; one graph.
    "kernel-mamba-packed": {
        "model_type": "nemotron_h",
        **_SHARED,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "hybrid_override_pattern": "M-*-",
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 32,
        "n_groups": 2,
        "conv_kernel": 4,
        "use_conv_bias": True,
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), False),
        "quantization": {"group_size": 32, "bits": 8},
    },
    # Short convolutions, likewise.
    "kernel-conv-packed": {
        "model_type": "lfm2",
        **_SHARED,
        "hidden_size": 64,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
        "quantization": {"group_size": 32, "bits": 8},
    },
    # Kimi's delta attention and latent attention, likewise.
    "kernel-kda-packed": {
        "model_type": "kimi_linear",
        **_SHARED,
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 0, "moe_intermediate_size": 0},
        **{"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
        "linear_attn_config": {
            **{"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 2, "head_dim": 32},
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 512,
        "quantization": {"group_size": 32, "bits": 8},
    },
    # Granite's and Falcon's, whose norms are not Nemotron's; the latter has attention beside Mamba 2.
    "kernel-granite": {
        "model_type": "granitemoehybrid",
        **_SHARED,
        **_MAMBA,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "nope",
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
    },
    "kernel-falcon": {
        "model_type": "falcon_h1",
        **_SHARED,
        **_MAMBA,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
    },
    "mixed": {
        "model_type": "gear",
        **_SHARED,
        "sliding_window": 12,
        "partial_rotary_factor": 0.5,
        "layer_types": ["sliding_attention", "conv_mixer", "full_attention"],
    },
    "indexed": {
        "model_type": "deepseek_v32",
        **_SHARED,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "index_topk": 16,
    },
    "moe": {
        "model_type": "qwen3_moe",
        **_SHARED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


# Its experts are read when they are needed: each layer has slots for some of them.
CONFIGS["moe-streamed"] = {**CONFIGS["moe"], "num_experts": 8}
EXPERT_MEMORY = {"moe-streamed": "100KB"}


def build(kind: str, seed: int = 0, **changed: Any) -> Any:
    """A model with random weights large enough that its greedy choices are far from ties."""
    model = random_models.build({**CONFIGS[kind], **changed}, seed=seed, spread=0.2)
    packing = CONFIGS[kind].get("quantization")
    if packing is not None:
        nn.quantize(model, **packing)
        mx.eval(model.parameters())
    return model


def adapter(kind: str, widest: int = 2048, *, exact: bool = False) -> Any:
    from ingot.kernels.device import current_device

    return _adapter(kind, current_device(), widest, exact)


@cache
def _adapter(kind: str, device: Device, widest: int, exact: bool) -> Any:
    from ingot.models.adapter import adapt_model

    return adapt_model(build(kind), CONFIGS[kind], device, widest=widest, exact=exact)
