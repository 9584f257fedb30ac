"""Writes random models of mlx-lm's as GGUF files, by the rules of llama.cpp's converter for each family.

This knows nothing of how ingot reads files. By `tests/oracle/test_llama_cpp.py`, llama.cpp computes of these files what
their originals compute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize

from ingot.upstream import model_classes
from tests.models.gguf.making import TinyModel, byte_level_vocabulary
from tests.models.layers import family_configs

VOCAB = len(byte_level_vocabulary()["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
ARCHITECTURES = {name: number for number, name in MODEL_ARCH_NAMES.items()}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"sliding_window": None}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16.0, "sliding_window": 4096, "attn_logit_softcapping": 20.0}),
    "gemma3n": (
        "gemma3n",
        {
            "altup_num_inputs": 4,
            "num_kv_shared_layers": 0,
            "laurel_rank": 64,
            "hidden_size_per_layer_input": 256,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.95] * 5,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "model_type": "gemma4_text",
            "num_kv_shared_layers": 0,
            "global_head_dim": 32,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4-small": (
        "gemma4",
        {
            "model_type": "gemma4_text",
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "tie_word_embeddings": True,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-moe": (
        "gemma4",
        {
            "model_type": "gemma4_text",
            "num_kv_shared_layers": 0,
            "global_head_dim": 32,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "qwen3_5": (
        "qwen35",
        {"rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    ),
    "qwen3_5_moe": (
        "qwen35moe",
        {"rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    ),
    "qwen3_next": ("qwen3next", {"partial_rotary_factor": 0.25}),
    "ministral3": ("mistral3", {"layer_types": None}),
    "ministral3-plain": (
        "mistral3",
        {
            "layer_types": None,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "type": "default",
                "rope_type": "default",
                "original_max_position_embeddings": 512,
                "llama_4_scaling_beta": 0.0,
            },
        },
    ),
    "mistral4": (
        "mistral4",
        {
            "rope_parameters": {
                "rope_theta": 10000.0,
                "type": "default",
                "rope_type": "default",
                "original_max_position_embeddings": 512,
                "llama_4_scaling_beta": 0.0,
            }
        },
    ),
    "granite": ("granite", {}),
    "granitemoehybrid": ("granitehybrid", {"mamba_d_head": 32}),
    "granitemoehybrid-dense": ("granitehybrid", {"mamba_d_head": 32, "shared_intermediate_size": 96}),
    "granitemoeshared": ("granitemoe", {"layer_types": ["attention"] * 3}),
    "nemotron_h": ("nemotron_h", {"hybrid_override_pattern": "M*-M-"}),
    "nemotron_h-moe": ("nemotron_h_moe", {"hybrid_override_pattern": "M*EME"}),
    "lfm2": ("lfm2", {"block_dim": 64, "block_ff_dim": 96, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2moe", {}),
    "minimax": ("minimax-m2", {"shared_intermediate_size": 0}),
    "phi3": ("phi3", {"partial_rotary_factor": 1.0, "rope_scaling": None}),
    "phi3-long": (
        "phi3",
        {
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "type": "longrope",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [1.5 + 0.1 * i for i in range(8)],
            },
        },
    ),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5}),
    "olmo2": ("olmo2", {}),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": False}),
    "ernie4_5": ("ernie4_5", {}),
    "cohere": ("command-r", {"logit_scale": 0.25}),
    "cohere2": (
        "cohere2",
        {"logit_scale": 0.25, "num_hidden_layers": 4, "sliding_window": 12, "sliding_window_pattern": 4},
    ),
    "dots1": ("dots1", {"num_key_value_heads": 4}),
    "nemotron": ("nemotron", {"partial_rotary_factor": 0.5}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"rope_theta": 10000.0, "tie_word_embeddings": False}),
    "hunyuan_v1_dense": ("hunyuan-dense", {}),
    "hunyuan": ("hunyuan-moe", {"use_cla": False, "cla_share_factor": 1}),
}


def describe(family: str) -> dict[str, Any]:
    """The family's configuration, of its language model alone."""
    name = family.split("-moe")[0].split("-small")[0].split("-long")[0].split("-plain")[0]
    name = {"granitemoeshared": "granitemoehybrid", "phi3": "phi3"}.get(name, name)
    if family == "gemma4-moe":
        name = "gemma4_text"
    config = family_configs.config(name)
    config = {**config, **config.get("text_config", {}), "model_type": config["model_type"]}
    config.pop("text_config", None)
    if not family.startswith(("gemma", "cohere2")):
        config["sliding_window"] = None
    return {**config, **SIZES, **FAMILIES[family][1]}


def random_model(family: str, folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A random model as a folder; its config and weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    config = describe(family) | changes
    mx.random.seed(3)
    nested = config["model_type"] == "gemma3n"
    stored = {**config, "text_config": config} if nested else config
    model_class, args = model_classes(stored)
    model = model_class(args.from_dict(stored))
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        noise = mx.random.normal(array.shape)
        if name.endswith(("A_log", "dt_bias", ".D")):
            weights[name] = 0.5 * noise
        elif "norm" in name or name.endswith(("scale", "scalar")):
            weights[name] = 1 + 0.1 * noise
        else:
            weights[name] = 0.1 * noise
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(stored))
    return config, {name: np.array(array) for name, array in weights.items()}


KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
}
EXPERTS = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
MIXTURES = {
    *("qwen3_5_moe", "qwen3_next", "mistral4", "granitemoehybrid", "granitemoeshared", "nemotron_h-moe", "lfm2_moe"),
    *("minimax", "hunyuan", "gemma4-moe"),
}
DELTA = {"qwen3_5", "qwen3_5_moe", "qwen3_next"}


def metadata_of(family: str, config: dict[str, Any]) -> dict[str, object]:
    """What llama.cpp's converter writes of such a config."""
    layers, head = config["num_hidden_layers"], config["head_dim"]
    hyper: dict[str, object] = {"block_count": layers, "feed_forward_length": config["intermediate_size"]}
    hyper |= {name: config[key] for key, name in KEYS.items() if isinstance(config.get(key), int | float)}
    hyper |= {"attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head}
    kinds = config.get("layer_types") or []
    if family in MIXTURES:
        hyper |= {"expert_count": 4} | {name: config[key] for key, name in EXPERTS.items() if key in config}
    if family in DELTA:
        hyper |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
            "full_attention_interval": config["full_attention_interval"],
            "rope.dimension_count": int(head * 0.25),
        }
        if family != "qwen3_next":
            hyper |= {"rope.dimension_sections": [1, 1, 0, 0]}
    if "sliding_attention" in kinds:
        hyper |= {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}
    if family == "gemma3n":
        normal = NormalDist()
        sparse = [normal.inv_cdf(share) if share else -1e9 for share in config["activation_sparsity_pattern"]]
        hyper |= {
            "altup.active_idx": 0,
            "altup.num_inputs": 4,
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "attention.shared_kv_layers": config["num_kv_shared_layers"],
            "activation_sparsity_scale": sparse,
        }
    if family.startswith("gemma4"):
        hyper |= _gemma4(config, kinds)
    if family in ("cohere", "cohere2", "nemotron", "stablelm", "starcoder2"):
        del hyper["attention.layer_norm_rms_epsilon"]
        hyper |= {"attention.layer_norm_epsilon": 1e-5}
    if family == "stablelm":
        hyper |= {"use_parallel_residual": False}
    if family == "cohere2":
        hyper |= {"attention.sliding_window_pattern": [True, True, True, False]}
    if family == "dots1":
        hyper |= {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        }
    if family in ("glm4", "minimax", "nemotron", "stablelm"):
        hyper |= {"rope.dimension_count": config.get("rotary_dim", head // 2)}
    if "mamba" in kinds or family.startswith(("nemotron_h", "lfm2", "granitemoehybrid")):
        hyper |= _hybrid(family, config, kinds)
    if family == "ministral3":
        scaling = config["rope_parameters"]
        hyper |= {"attention.temperature_scale": scaling["llama_4_scaling_beta"]}
        hyper |= {"rope.scaling.original_context_length": scaling["original_max_position_embeddings"]}
        hyper |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 1.0}
        hyper |= {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
    if family == "mistral4":
        plain, rotated, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
        rank = config["kv_lora_rank"]
        hyper |= {
            "rope.dimension_count": rotated,
            "attention.key_length_mla": plain + rotated,
            "attention.value_length_mla": value,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": config["q_lora_rank"],
            "attention.kv_lora_rank": rank,
            "expert_shared_count": 1,
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_gating_func": 1,
            "expert_weights_norm": True,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
        }
    if family == "granitemoeshared":
        hyper |= {"expert_shared_feed_forward_length": config["shared_intermediate_size"]}
        del hyper["expert_feed_forward_length"]
    if family == "lfm2_moe":
        hyper |= {"leading_dense_block_count": 1, "expert_gating_func": 2}
        hyper.pop("expert_shared_feed_forward_length")
    if family == "minimax":
        hyper |= {"expert_gating_func": 2, "expert_feed_forward_length": config["intermediate_size"]}
    if family.startswith("hunyuan"):
        scaling = config["rope_scaling"]
        hyper |= {"rope.freq_base": 10000.0 * scaling["alpha"] ** (head / (head - 2)), "rope.scaling.type": "none"}
        hyper |= {"rope.scaling.factor": 1.0}
    if family == "hunyuan":
        hyper |= {
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_shared_feed_forward_length": config["intermediate_size"],
            "expert_shared_count": 1,
            "expert_used_count": config["moe_topk"],
        }
    if family == "phi3-long":
        hyper |= {"rope.scaling.original_context_length": 64, "rope.scaling.type": "longrope"}
        hyper |= {"rope.scaling.attn_factor": float(np.sqrt(1 + np.log(512 / 64) / np.log(64)))}
        hyper |= {"context_length": 512}
    if family.startswith("phi3"):
        hyper |= {"attention.sliding_window": 0}
        hyper.setdefault("rope.scaling.original_context_length", 512)
    return {f"{FAMILIES[family][0]}.{key}": value for key, value in hyper.items()}


def _gemma4(config: dict[str, Any], kinds: list[str]) -> dict[str, object]:
    wide, narrow, shared = config["global_head_dim"], config["head_dim"], config["num_kv_shared_layers"]
    layers, inner = config["num_hidden_layers"], config["intermediate_size"]
    double = config.get("use_double_wide_mlp", True) and shared
    everywhere = config.get("num_global_key_value_heads") or config["num_key_value_heads"]
    found: dict[str, object] = {
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": narrow,
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": 30.0,
        "attention.head_count_kv": [
            config["num_key_value_heads"] if kind == "sliding_attention" else everywhere for kind in kinds
        ],
    }
    if double:
        found["feed_forward_length"] = [inner if layer < layers - shared else 2 * inner for layer in range(layers)]
    if config.get("num_experts"):
        found["expert_used_count"] = config["top_k_experts"]
    return found


def _hybrid(family: str, config: dict[str, Any], kinds: list[str]) -> dict[str, object]:
    heads, inner = config["num_key_value_heads"], config["intermediate_size"]
    if family.startswith("lfm2"):
        own: dict[str, object] = {"shortconv.l_cache": config["conv_L_cache"]}
        if config.get("norm_eps"):
            own["attention.layer_norm_rms_epsilon"] = config["norm_eps"]
        return own | {"attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in kinds]}
    if family.startswith("nemotron_h"):
        pattern, mamba = config["hybrid_override_pattern"], (config["mamba_num_heads"], config["mamba_head_dim"])
        wide = config["moe_intermediate_size"] if "E" in pattern else inner
        found: dict[str, object] = {
            "attention.head_count_kv": [heads if kind == "*" else 0 for kind in pattern],
            "feed_forward_length": [wide if kind in "-E" else 0 for kind in pattern],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
            "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
            "ssm.state_size": config["ssm_state_size"],
            "ssm.group_count": config["n_groups"],
            "ssm.conv_kernel": config["conv_kernel"],
        }
        if "E" in pattern:
            found |= {
                "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
                "expert_shared_count": config["n_shared_experts"],
                "expert_weights_norm": config["norm_topk_prob"],
                "expert_weights_scale": config["routed_scaling_factor"],
                "expert_group_count": 1,
                "expert_gating_func": 2,
            }
    else:
        mamba = (config["mamba_n_heads"], config["mamba_d_head"])
        found = {
            "attention.head_count_kv": [heads if kind == "attention" else 0 for kind in kinds],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.conv_kernel": config["mamba_d_conv"],
            "rope.scaling.finetuned": config.get("position_embedding_type", "rope") == "rope",
        }
        if family == "granitemoehybrid":
            found |= {"expert_shared_feed_forward_length": config["shared_intermediate_size"]}
            found |= {"expert_feed_forward_length": config["intermediate_size"]}
    return found | {"ssm.time_step_rank": mamba[0], "ssm.inner_size": mamba[0] * mamba[1]}


NAMED = {  # mlx-lm's own names
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "block_sparse_moe.switch_mlp": "mlp.experts",
    "experts.switch_glu": "experts",
    "language_model.lm_head": "lm_head",
    "mixer.switch_mlp.fc1": "mlp.experts.up_proj",
    "mixer.switch_mlp.fc2": "mlp.experts.down_proj",
    "switch_mlp": "experts",
    "embed_q": "k_b_proj",
    "unembed_out": "v_b_proj",
    ".dt_bias": ".dt_proj.bias",
    "e_score_correction_bias": "e_score_correction.bias",
    "expert_bias": "expert_bias.bias",
    "layer_scalar": "layer_scalar.weight",
    "correct_output_scale": "correct_output_scale.weight",
}
Tensors = dict[str, np.ndarray]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head's rows taken in turn, which is how llama's kind of rotation is stored."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _tiled(values: np.ndarray, config: dict[str, Any], axis: int = 0) -> np.ndarray:
    """The first value head of every key head, then all second ones..."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    moved = np.moveaxis(values, axis, 0)
    apart = moved.reshape(keys, heads // keys, -1, *moved.shape[1:]).swapaxes(0, 1)
    return np.moveaxis(apart.reshape(moved.shape), 0, axis)


def as_published(family: str, config: dict[str, Any], weights: Tensors) -> Tensors:
    """As the tensors are in a file, by names of which most are not those of the file yet."""
    found: Tensors = {}
    for name, array in weights.items():
        if "switch_glu.gate_proj" in name:
            both = np.concatenate([array, weights[name.replace("gate_proj", "up_proj")]], axis=1)
            found[name.replace("gate_proj.weight", "gate_up_proj.weight")] = both
            continue
        if "switch_glu.up_proj" in name:
            continue
        found |= _as_published(family, config, name, array)
    return found


def _as_published(family: str, config: dict[str, Any], name: str, array: np.ndarray) -> Tensors:
    layer = re.search(r"layers\.(\d+)\.", name)
    block = f"blk.{layer[1]}." if layer else ""
    if family in ("gemma", "gemma2", "nemotron") and name.endswith("norm.weight"):
        return {name: array + 1}
    if re.search(r"self_attn\.[qk]_proj\.", name) and family.startswith(("ministral3", "granite", "smollm3")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return {name: interleaved(array, heads)}
    if "conv" in name and array.ndim == 3:
        array = array[..., 0]
    if name.endswith("A_log"):
        array = -np.exp(array)
    if family.startswith(("nemotron_h", "granitemoehybrid")):
        if name.endswith(("A_log", ".D")):
            return {name: array[:, None]}
        if re.search(r"(mamba|mixer)\.norm\.weight", name):
            groups = config.get("n_groups") or config["mamba_n_groups"]
            return {name: array.reshape(groups, -1)}
    if family.startswith("granitemoe") and "shared_mlp.input_linear" in name:
        gate, up = np.split(array, 2)
        return {f"{block}ffn_gate_shexp.weight": gate, f"{block}ffn_up_shexp.weight": up}
    if family == "gemma4-moe":
        if name.endswith("router.scale"):
            return {f"{block}ffn_gate_inp.scale": array}
        if name.endswith("per_expert_scale"):
            return {f"{block}ffn_down_exps.scale": array}
    if family in DELTA and "linear_attn." in name:
        return _delta(family, config, name, block, array)
    return {name: array}


def _delta(family: str, config: dict[str, Any], name: str, block: str, array: np.ndarray) -> Tensors:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if family == "qwen3_next":
        if "in_proj_qkvz" not in name:
            return {name: array}
        apart = array.reshape(keys, -1, array.shape[-1])
        more = values // keys * value
        q, k, v, z = np.split(apart, [key, 2 * key, 2 * key + more], axis=1)
        qkv = np.concatenate([part.reshape(-1, array.shape[-1]) for part in (q, k, v)])
        return {f"{block}attn_qkv.weight": qkv, f"{block}attn_gate.weight": z.reshape(-1, array.shape[-1])}
    if re.search(r"in_proj_[zab]\.|A_log|dt_bias", name):
        return {name: _tiled(array, config)}
    if re.search(r"in_proj_qkv\.|conv1d", name):
        return {name: np.concatenate([array[: 2 * keys * key], _tiled(array[2 * keys * key :], config)])}
    if "out_proj" in name:
        return {name: _tiled(array, config, axis=1)}
    return {name: array}


def as_gguf(family: str, config: dict[str, Any], weights: Tensors, kinds: Callable[[str], Kind]) -> TinyModel:
    """The model as a file; `kinds` says the format of a matrix by its name."""
    architecture, tensors = FAMILIES[family][0], as_published(family, config, weights)
    metadata = {"general.architecture": architecture, **byte_level_vocabulary(), **metadata_of(family, config)}
    model = TinyModel(metadata, {})
    names = get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    for name, array in tensors.items():
        for ours, theirs in NAMED.items():
            name = name.replace(ours, theirs)
        if "mlp.experts" in name:
            name = name.replace("backbone.", "model.")
        if stacked := re.fullmatch(r"(.*altup_\w+)\.\d+(\.weight)", name):
            stacks.setdefault(stacked[1] + stacked[2], []).append(array)
            continue
        _add(model, name, array, names, kinds)
    for name, arrays in stacks.items():
        _add(model, name, np.stack(arrays), names, kinds)
    for name, values in _frequencies(family, config).items():
        model.tensors[name] = (Kind.F32, values.shape, values)
    return model


def _add(model: TinyModel, name: str, array: np.ndarray, names: Any, kinds: Callable[[str], Kind]) -> None:
    known = re.match(r"blk\.|output|token_embd", name)
    named = name if known else names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert named is not None, name
    values = np.ascontiguousarray(array.squeeze() if "shared_expert_gate" in name else array)
    packable = values.ndim > 1 and named.endswith("weight") and "conv" not in named and values.shape[-1] % 32 == 0
    kind = kinds(named) if packable else Kind.F32
    model.tensors[named] = (kind, values.shape, values if kind == Kind.F32 else quantize(values, kind))


def _frequencies(family: str, config: dict[str, Any]) -> Tensors:
    if family.startswith("gemma4"):
        half = config["global_head_dim"] // 2
        return {"rope_freqs.weight": np.array([1.0] * (half // 4) + [1e30] * (half - half // 4), np.float32)}
    if family == "phi3-long":
        scaling = config["rope_scaling"]
        return {
            f"rope_factors_{name}.weight": np.array(scaling[f"{name}_factor"], np.float32) for name in ("short", "long")
        }
    return {}
