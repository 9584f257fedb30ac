"""The shapes of model families that people run, narrow or in real sizes, and models of random weights in them.

It does not import mlx until a model is made: what is measured may have to bind its libraries before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.random_models import build

_BASE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DELTA = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 8192,
    "llama_4_scaling_beta": 0.1,
}


def _kimi_layers(layers: int, heads: int, size: int) -> dict[str, Any]:
    """Of four layers the last one has latent attention, and so does the last one of all."""
    full = sorted({*range(4, layers, 4), layers})
    delta = [layer for layer in range(1, layers + 1) if layer not in full]
    return {
        **{"full_attn_layers": full, "kda_layers": delta},
        **{"num_heads": heads, "head_dim": size, "short_conv_kernel_size": 4},
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 8},
    "mistral": {"model_type": "ministral3", "num_hidden_layers": 8, "rope_parameters": _YARN},
    "qwen3": {"model_type": "qwen3", "num_hidden_layers": 8},
    "qwen3-moe": {"model_type": "qwen3_moe", "num_hidden_layers": 6, **_EXPERTS},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 6,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 64,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "gemma4-e4b": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 5,
        "hidden_size_per_layer_input": 64,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "use_double_wide_mlp": False,
        "tie_word_embeddings": True,
    },
    "gemma4-a4b": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "head_dim": 64,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "use_double_wide_mlp": False,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 64,
        "tie_word_embeddings": True,
    },
    "granite4-h": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 8,
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "position_embedding_type": "nope",
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 64,
        "shared_intermediate_size": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "logits_scaling": 6.0,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "tie_word_embeddings": True,
    },
    "nemotron-h": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 13,
        "hybrid_override_pattern": "M-M-M*-M-M-M-",
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "mamba_proj_bias": False,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 8,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [2, 5, 7],
    },
    "qwen3.5": _DELTA,
    "qwen3.5-moe": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "glm4.7-flash": {
        "model_type": "glm4_moe_lite",
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "n_routed_experts": 16,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_scaling": None,
    },
    "kimi-linear": {
        "model_type": "kimi_linear",
        **_EXPERTS,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "model_max_length": 8192,
        "linear_attn_config": _kimi_layers(8, heads=4, size=64),
    },
}
"""Narrow shapes with few layers, but layers of each kind in their real proportion, as `config.json` has them."""
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 4096}
"""What makes a narrow shape large enough for arithmetic to matter."""


def _sized(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
    }


_DELTA_SIZES = {
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
REAL: dict[str, dict[str, Any]] = {
    "llama": _sized(128256, 4096, 14336, 32, 32, 8, 128),
    "mistral": _sized(131072, 5120, 32768, 40, 32, 8, 128),
    "qwen3": _sized(151936, 4096, 12288, 36, 32, 8, 128),
    "qwen3-moe": {
        **_sized(151936, 2048, 6144, 48, 32, 4, 128),
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gpt-oss": {
        **_sized(201088, 2880, 2880, 24, 64, 8, 64),
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gemma3": {
        **_sized(262208, 3840, 15360, 48, 16, 8, 256),
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
    },
    "gemma4-e4b": {
        **_sized(262144, 2560, 10240, 42, 8, 2, 256),
        "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256,
    },
    "gemma4-a4b": {
        **_sized(262144, 2816, 2112, 30, 16, 8, 256),
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "sliding_window": 1024,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "granite4-h": {
        **_sized(100352, 1536, 512, 40, 12, 4, 128),
        "layer_types": [*["mamba"] * 5, "attention", *[*["mamba"] * 9, "attention"] * 3, *["mamba"] * 4],
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 48,
    },
    "nemotron-h": {
        **_sized(131072, 4480, 15680, 56, 40, 8, 128),
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "n_groups": 8,
    },
    "lfm2": {**_sized(65536, 2048, 10752, 30, 32, 8, 64), "full_attn_idxs": [2, 5, 9, 13, 17, 21, 25, 28]},
    "qwen3.5": {**_sized(248320, 4096, 12288, 32, 16, 4, 256), **_DELTA_SIZES},
    "qwen3.5-moe": {
        **_sized(248320, 2048, 6144, 40, 16, 2, 256),
        **_DELTA_SIZES,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "glm4.7-flash": {
        **_sized(154880, 2048, 10240, 47, 20, 20, 256),
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
    },
    "kimi-linear": {
        **_sized(163840, 2304, 9216, 27, 32, 32, 72),
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "linear_attn_config": _kimi_layers(27, heads=32, size=128),
    },
}
"""What makes them as large as the models that people run."""


OTHER_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-122b-a10b": (
        "qwen3.5-moe",
        {
            **_sized(248320, 3072, 8192, 48, 32, 2, 256),
            **_DELTA_SIZES,
            "linear_num_value_heads": 64,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
    ),
    "qwen3.5-35b-a3b": ("qwen3.5-moe", REAL["qwen3.5-moe"]),
    "qwen3.5-2b": (
        "qwen3.5",
        {**_sized(248320, 2048, 6144, 24, 8, 2, 256), **_DELTA_SIZES, "linear_num_value_heads": 16},
    ),
    "qwen3.5-0.8b": (
        "qwen3.5",
        {**_sized(248320, 1024, 3584, 24, 8, 2, 256), **_DELTA_SIZES, "linear_num_value_heads": 16},
    ),
}
"""Further sizes, by name: the family, and what is its own."""


PACKED_AS: dict[str, Callable[[str], dict[str, Any]]] = {
    "gpt-oss": lambda path: (
        {"group_size": 32, "bits": 4, "mode": "mxfp4"} if ".experts." in path else {"group_size": 64, "bits": 8}
    ),
}
"""How layers of checkpoints are quantised, by their paths, where families have a form of their own."""


def family_config(family: str, changes: dict[str, Any], real: dict[str, Any]) -> dict[str, Any]:
    """The config of a family: `changes` to what families have in common, and `real` to what is its own."""
    config = {**_BASE, **changes, **FAMILIES[family], **real}
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    return config | {"block_dim": config["hidden_size"], "block_ff_dim": config["intermediate_size"]}


def random_model(
    family: str,
    dtype: str = "bfloat16",
    *,
    changes: dict[str, Any] | None = None,
    real: bool = False,
    sizes: dict[str, Any] | None = None,
    bits: int = 4,
) -> tuple[dict[str, Any], Any]:
    """The config of a family, and a model with random weights of so many bits, or, where that is 4, quantised as its
    checkpoints are; 0: as they are. Weights of one layer at a time are in memory before they are packed. `sizes` are
    others than the `real` ones."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_unflatten

    config = family_config(family, changes or {}, REAL[family] if real else sizes or {})
    model = build(config, dtype=getattr(mx, dtype), lazily=bits > 0)
    names = ("gate.weight", "router.layer.weight", "router.proj.weight")
    routers = [(path, x) for path, x in tree_flatten(model.parameters()) if path.endswith(names)]
    model.update(tree_unflatten([(path, mx.random.normal(x.shape, x.dtype, scale=0.02)) for path, x in routers]))
    if not bits:
        return config, model
    chosen: Callable[[str, Any], Any] = getattr(model, "quant_predicate", None) or (lambda path, module: True)

    def packed(path: str, module: Any) -> Any:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0
        if fits and bits == 4 and family in PACKED_AS:
            return PACKED_AS[family](path)
        return chosen(path, module) if fits else False

    nn.quantize(model, group_size=64, bits=bits, class_predicate=packed)
    for _, weight in tree_flatten(model.parameters()):
        mx.eval(weight)
    return config, model
