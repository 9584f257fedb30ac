"""Parts of the config that no table of names gives, and rules for tensors that are stored otherwise: for those
architectures that need them.

A function gets the hyper-parameters and the config so far, and returns what to add. It raises ModelError for a model
that cannot be run as it is described.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from ingot.errors import ModelError
from ingot.models.gguf.blueprint import ROPE_FREQS
from ingot.models.gguf.config import layer_kinds, window_period
from ingot.models.gguf.file import Hyperparameters
from ingot.models.gguf.tensors import Parameter, Rule, Stored, as_stored, from_rows, log_of_negated

SOFTMAX, SIGMOID = 1, 2  # how files number the router's function
MANY = float(1 << 30)  # divisors of frequencies above it mean that a pair is not rotated
Config = dict[str, Any]


def expert_width(hyper: Hyperparameters) -> int:
    """An expert's width, which is that of a dense MLP where the file does not state it."""
    return hyper.integer("expert_feed_forward_length", hyper.integer("feed_forward_length"))


def experts_alone(hyper: Hyperparameters, config: Config) -> Config:
    """Mixtures that call the width of an expert as others call that of an MLP."""
    return {"intermediate_size": expert_width(hyper)}


def experts(hyper: Hyperparameters, config: Config) -> Config:
    return {"moe_intermediate_size": expert_width(hyper), "decoder_sparse_step": 1, "mlp_only_layers": []}


def qwen2_experts(hyper: Hyperparameters, config: Config) -> Config:
    inner = hyper.integer("feed_forward_length")
    shared = hyper.integer("expert_shared_feed_forward_length", inner)
    return experts(hyper, config) | {"shared_expert_intermediate_size": shared}


def shared_experts(hyper: Hyperparameters, config: Config) -> Config:
    """DeepSeek's experts and their like: the first layers dense, then shared experts and ones that are chosen by a
    softmax, or by a sigmoid and a bias."""
    inner, shared = expert_width(hyper), hyper.integer("expert_shared_count", 1)
    hyper.refuse_unless("expert_shared_feed_forward_length", shared * inner)
    gating = hyper.get("expert_gating_func", SOFTMAX)
    hyper.refuse_unless("expert_gating_func", SOFTMAX, SIGMOID)
    dense, layers = hyper.get("leading_dense_block_count", 0), config["num_hidden_layers"]
    if not isinstance(dense, int) or not 0 <= dense <= layers:
        raise ModelError(f"{hyper.architecture}.leading_dense_block_count is {dense!r} of {layers} layers")
    groups = hyper.integer("expert_group_count", 1)
    return {
        "moe_intermediate_size": inner,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "n_group": groups,
        "topk_group": hyper.integer("expert_group_used_count", 1),
        "routed_scaling_factor": hyper.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(hyper.get("expert_weights_norm", False)),
        "scoring_func": "sigmoid" if gating == SIGMOID else "softmax",
        "topk_method": "noaux_tc" if gating == SIGMOID else "group_limited_greedy" if groups > 1 else "greedy",
    }


def latent_attention(hyper: Hyperparameters, config: Config) -> Config:
    """DeepSeek's. Files with absorbed projections state a head's own sizes under other names."""
    rotated, heads = hyper.integer("rope.dimension_count"), hyper.integer("attention.head_count")
    key, value = hyper.integer("attention.key_length"), hyper.integer("attention.value_length")
    key, value = hyper.integer("attention.key_length_mla", key), hyper.integer("attention.value_length_mla", value)
    if key <= rotated:
        raise ModelError(f"{hyper.architecture}.rope.dimension_count is {rotated} of keys of {key}")
    hyper.get("attention.head_count_kv")  # one where projections are absorbed into queries; head_count is what counts
    return shared_experts(hyper, config) | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "q_lora_rank": hyper.integer("attention.q_lora_rank") if hyper.get("attention.q_lora_rank") else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def latent_growth(number: float) -> Config:
    """A tenth of the number in configs, which is the same for positions and for scores."""
    return dict.fromkeys(("mscale", "mscale_all_dim"), round(number * 10, 6))


def keys_and_values(parameter: Parameter) -> Stored | None:
    """Older files have keys and values in one matrix, newer ones in two, with that of the keys transposed; V2's model
    has one, V3's two."""
    config, whole = parameter.config, f"{parameter.block}attn_kv_b.weight"
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    if whole in parameter.file.tensors:
        each = slice(0, plain) if parameter.path.endswith("embed_q.weight") else slice(plain, None)

        def part(values: np.ndarray) -> np.ndarray:
            own = values.reshape(heads, plain + value, rank)[:, each]
            return own.swapaxes(1, 2) if each.start == 0 else own

        how = {} if parameter.path.endswith("kv_b_proj.weight") else {"convert": part, "plain": True}
        return Stored((whole,), ((heads * (plain + value), rank),), how)
    if not parameter.path.endswith("kv_b_proj.weight"):
        return None
    names = tuple(f"{parameter.block}attn_{part}_b.weight" for part in "kv")
    return Stored(names, ((heads, rank, plain), (heads, value, rank)), {"join": _key_value_rows, "plain": True})


def _key_value_rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """[heads, rank, plain] and [heads, values, rank] as the rows of one matrix, a head's keys before its values."""
    keys, values = parts
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])


def gpt_oss(hyper: Hyperparameters, config: Config) -> Config:
    kinds = layer_kinds(hyper, config["num_hidden_layers"], 2)
    return experts_alone(hyper, config) | {"layer_types": kinds}


def gemma2(hyper: Hyperparameters, config: Config) -> Config:
    """mlx-lm's model attends to everything in all layers, which is the same until the window is full."""
    heads, hidden, layers = hyper.integer("attention.head_count"), config["hidden_size"], config["num_hidden_layers"]
    head, window = hyper.integer("attention.key_length"), hyper.integer("attention.sliding_window", 4096)
    hyper.refuse_unless("attention.sliding_window_pattern", 2)
    return {
        # The one size whose queries are scaled by the width per head rather than by the head's own width.
        "query_pre_attn_scalar": hidden // heads if layers == 46 else head,
        "max_position_embeddings": min(window, config["max_position_embeddings"]),
    }


def gemma3(hyper: Hyperparameters, config: Config) -> Config:
    heads, hidden, layers = hyper.integer("attention.head_count"), config["hidden_size"], config["num_hidden_layers"]
    hyper.refuse_unless("final_logit_softcapping", 0.0)
    return {
        "query_pre_attn_scalar": hidden // heads if layers == 62 else hyper.integer("attention.key_length"),
        "sliding_window": hyper.integer("attention.sliding_window"),
        "sliding_window_pattern": window_period(hyper, layers, 6),
        "rope_local_base_freq": hyper.number("rope.freq_base_swa", 10_000.0),
    }


def cohere2(hyper: Hyperparameters, config: Config) -> Config:
    period = window_period(hyper, config["num_hidden_layers"], 4)
    return {"sliding_window": hyper.integer("attention.sliding_window"), "sliding_window_pattern": period}


def gemma3n(hyper: Hyperparameters, config: Config) -> Config:
    layers, tensors = config["num_hidden_layers"], hyper.file.tensors
    widths, scales = hyper.layers("feed_forward_length", layers), hyper.get("activation_sparsity_scale")
    if not isinstance(scales, list) or len(scales) < layers:
        raise ModelError(f"{hyper.architecture}.activation_sparsity_scale is no number for each of {layers} layers")
    rank, table = (tensors.get(name) for name in ("blk.0.laurel_l.weight", "per_layer_token_embd.weight"))
    if rank is None or table is None:
        raise ModelError("the file lacks the tensor 'blk.0.laurel_l.weight' or 'per_layer_token_embd.weight'")
    return {
        "intermediate_size": widths[0] if len(set(widths)) == 1 else widths,
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 4) if scale > -8 else 0.0 for scale in scales],
        "layer_types": layer_kinds(hyper, layers, 5),
        "rope_local_base_freq": hyper.number("rope.freq_base_swa", 10_000.0),
        "laurel_rank": rank.shape[0],
        "vocab_size_per_layer_input": table.shape[0],
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "final_logit_softcapping": 30.0,
    }


def one_of_stack(end: str) -> Rule:
    """A matrix of a tensor that holds several; the number is in the model's name."""

    def rule(parameter: Parameter) -> Stored:
        number, count = int(re.findall(r"\.(\d+)\.", parameter.path)[-1]), parameter.config["altup_num_inputs"] - 1
        rows, columns = parameter.shape
        return from_rows(end, (count, rows, columns), np.arange(number * rows, (number + 1) * rows))

    return rule


def gemma4(hyper: Hyperparameters, config: Config) -> Config:
    layers, tensors = config["num_hidden_layers"], hyper.file.tensors
    kinds = layer_kinds(hyper, layers, 6) or []
    heads, widths = hyper.layers("attention.head_count_kv", layers), hyper.layers("feed_forward_length", layers)
    wide, narrow = hyper.integer("attention.key_length"), hyper.integer("attention.key_length_swa")
    for key, size in {"attention.value_length": wide, "attention.value_length_swa": narrow}.items():
        hyper.refuse_unless(key, size)
    hyper.refuse_unless("rope.dimension_count", wide)
    hyper.refuse_unless("rope.dimension_count_swa", narrow)
    own = {kind: {count for count, each in zip(heads, kinds, strict=True) if each == kind} for kind in set(kinds)}
    if any(len(counts) > 1 for counts in own.values()):
        raise ModelError(f"{hyper.architecture}.attention.head_count_kv differs within layers of one kind")
    shared = hyper.get("attention.shared_kv_layers", 0)
    table, first = tensors.get("per_layer_token_embd.weight"), kinds.index("full_attention")
    (everywhere,) = own["full_attention"]
    mixture = bool(hyper.get("expert_count", 0))
    return {
        "num_attention_heads": hyper.integer("attention.head_count"),
        "num_key_value_heads": next(iter(own.get("sliding_attention", {everywhere}))),
        "num_global_key_value_heads": everywhere,
        "head_dim": narrow,
        "global_head_dim": wide,
        "layer_types": kinds,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": bool(shared) and widths[-1] == 2 * widths[0],
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": hyper.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in tensors,
        "enable_moe_block": mixture,
        "rope_theta": hyper.number("rope.freq_base", 1_000_000.0),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": hyper.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": _rotated_share(hyper, wide),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": hyper.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def _rotated_share(hyper: Hyperparameters, head: int) -> float:
    """How much of a head is rotated, by the divisors of its frequencies: one, or so much that it does not matter."""
    entry = hyper.file.tensors.get(ROPE_FREQS)
    if entry is None:
        return 1.0
    if entry.shape != (head // 2,) or entry.type.name != "F32":
        raise ModelError(f"tensor {ROPE_FREQS!r} is {entry.type.name} of shape {list(entry.shape)}, not [{head // 2}]")
    entry.check_bounds()
    divisors = entry.rows(0, 1).view("<f4")[0]
    rotated = int(np.sum(divisors == 1))
    if not np.all(divisors[:rotated] == 1) or not np.all(divisors[rotated:] > MANY):
        raise ModelError(f"tensor {ROPE_FREQS!r} holds a frequency scaling that is not supported")
    return 2 * rotated / head


def gated_delta(hyper: Hyperparameters, config: Config) -> Config:
    """Qwen3-Next and Qwen 3.5: gated delta nets, and attention in every so manieth layer."""
    layers, interval = config["num_hidden_layers"], hyper.integer("full_attention_interval", 4)
    kinds = [(layer + 1) % interval != 0 for layer in range(layers)]
    stated = hyper.get("attention.recurrent_layers")
    if isinstance(stated, list) and [bool(each) for each in stated[:layers]] != kinds:
        raise ModelError(f"{hyper.architecture}.attention.recurrent_layers is irregular: not supported")
    hyper.get("rope.dimension_sections")  # of images; a text's positions are the same in all
    values = hyper.integer("ssm.time_step_rank")
    extra = {} if not hyper.get("expert_count", 0) else {"moe_intermediate_size": expert_width(hyper)}
    return extra | {
        "full_attention_interval": interval,
        "linear_num_value_heads": values,
        "linear_value_head_dim": hyper.integer("ssm.inner_size") // values,
    }


def _value_heads(config: Any, size: int) -> np.ndarray:
    """Where each of the model's rows of values is: files have the first value head of every key head, then all
    second ones; the model has those of a key head side by side."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return np.arange(values * size).reshape(values // keys, keys, size).swapaxes(0, 1).ravel()


def delta_values(parameter: Parameter) -> Stored:
    """Parameters with a row, or a number, for each value head or each of its values."""
    config, count = parameter.config, parameter.shape[0]
    convert = {"convert": log_of_negated} if parameter.path.endswith("A_log") else {}
    return as_stored(rows=_value_heads(config, count // config["linear_num_value_heads"]), **convert)


def delta_mixed(parameter: Parameter) -> Stored:
    """Those of queries, keys and values in turn; the first two as the model has them."""
    values = parameter.config["linear_num_value_heads"] * parameter.config["linear_value_head_dim"]
    before = parameter.shape[0] - values
    own = before + _value_heads(parameter.config, parameter.config["linear_value_head_dim"])
    return as_stored(rows=np.concatenate([np.arange(before), own]))


def delta_output(parameter: Parameter) -> Stored:
    return as_stored(columns=_value_heads(parameter.config, parameter.config["linear_value_head_dim"]))


QWEN35_RULES: dict[str, Rule] = {
    r"linear_attn\.(in_proj_[zab]\.weight|A_log|dt_bias)$": delta_values,
    r"linear_attn\.(in_proj_qkv|conv1d)\.weight$": delta_mixed,
    r"linear_attn\.out_proj\.weight$": delta_output,
}


def mixed_betas(half: int) -> Rule:
    """Qwen3-Next has b and a in one matrix, those of each key head side by side."""

    def rule(parameter: Parameter) -> Stored:
        keys, (values, hidden) = parameter.config["linear_num_key_heads"], parameter.shape
        rows = np.arange(2 * values).reshape(keys, 2, -1)[:, half].ravel()
        return from_rows(f"{parameter.block}ssm_ba.weight", (2 * values, hidden), rows)

    return rule


def mamba_layers(hyper: Hyperparameters, config: Config) -> list[str]:
    """Layers without keys and values are recurrent."""
    counts = hyper.layers("attention.head_count_kv", config["num_hidden_layers"])
    return ["attention" if count else "mamba" for count in counts]


def attention_of_some(hyper: Hyperparameters, config: Config) -> Config:
    """Heads of models that have attention in some layers alone."""
    layers, heads = config["num_hidden_layers"], hyper.integer("attention.head_count")
    counts = set(hyper.layers("attention.head_count_kv", layers)) - {0}
    if len(counts) > 1:
        raise ModelError(f"{hyper.architecture}.attention.head_count_kv differs between layers with attention")
    head = hyper.integer("attention.key_length", config["hidden_size"] // heads)
    hyper.refuse_unless("attention.value_length", head)
    return {"num_attention_heads": heads, "num_key_value_heads": max(counts, default=heads), "head_dim": head}


def mamba_sizes(hyper: Hyperparameters) -> Config:
    heads, ends = hyper.integer("ssm.time_step_rank"), {name.split(".", 2)[-1] for name in hyper.file.tensors}
    head = hyper.integer("ssm.inner_size") // heads
    biased, convolved = "ssm_in.bias" in ends, "ssm_conv1d.bias" in ends
    return {
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), head),
        **dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), convolved),
        "mamba_proj_bias": biased,
    }


def granite_hybrid(hyper: Hyperparameters, config: Config) -> Config:
    rotated = hyper.get("rope.scaling.finetuned", True)  # here, this says whether positions are rotated at all
    mixture = bool(hyper.get("expert_count", 0))
    inner = hyper.integer("feed_forward_length")
    return {
        **attention_of_some(hyper, config),
        **mamba_sizes(hyper),
        "layer_types": mamba_layers(hyper, config),
        "position_embedding_type": "rope" if rotated else "nope",
        "intermediate_size": expert_width(hyper),
        "shared_intermediate_size": hyper.integer("expert_shared_feed_forward_length", inner) if mixture else inner,
        **({} if mixture else {"num_local_experts": None}),
        "time_step_limit": [0.0, 1e30],
    }


def granite_shared(hyper: Hyperparameters, config: Config) -> Config:
    """Granite's mixtures with a shared expert are its hybrid without Mamba layers."""
    return {
        "layer_types": ["attention"] * config["num_hidden_layers"],
        **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv", "mamba_n_groups"), 1),
        "position_embedding_type": "rope",
        "intermediate_size": expert_width(hyper),
    }


def nemotron_h(hyper: Hyperparameters, config: Config) -> Config:
    layers, mixture = config["num_hidden_layers"], bool(hyper.get("expert_count", 0))
    widths = hyper.layers("feed_forward_length", layers)
    kinds = mamba_layers(hyper, config)
    inner = {width for width in widths if width}
    if len(inner) > 1:
        raise ModelError(f"{hyper.architecture}.feed_forward_length differs between layers, which is not supported")
    pattern = [
        ("E" if mixture else "-") if width else {"attention": "*", "mamba": "M"}[kind]
        for width, kind in zip(widths, kinds, strict=True)
    ]
    if mixture:
        hyper.refuse_unless("expert_group_count", 1)
        hyper.refuse_unless("expert_gating_func", SIGMOID)
    ends = {name.split(".", 2)[-1] for name in hyper.file.tensors}
    return {
        **attention_of_some(hyper, config),
        **mamba_sizes(hyper),
        "hybrid_override_pattern": pattern,
        "intermediate_size": max(inner, default=config["hidden_size"]),
        "use_bias": "ssm_in.bias" in ends,
        "mlp_bias": "ffn_up.bias" in ends,
        "attention_bias": "attn_q.bias" in ends,
        **({"n_group": 1, "topk_group": 1} if mixture else {}),
    }


def lfm2(hyper: Hyperparameters, config: Config) -> Config:
    kinds, mixture = mamba_layers(hyper, config), bool(hyper.get("expert_count", 0))
    inner = hyper.integer("feed_forward_length")
    dense = {"num_dense_layers": hyper.get("leading_dense_block_count", 0), "use_expert_bias": True} if mixture else {}
    ends = {name.split(".", 2)[-1] for name in hyper.file.tensors}
    return {
        **attention_of_some(hyper, config),
        **dense,
        "layer_types": ["full_attention" if kind == "attention" else "conv" for kind in kinds],
        "conv_bias": "shortconv.conv.bias" in ends,
        "intermediate_size": inner,
        "block_dim": config["hidden_size"],
        "block_ff_dim": inner,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


def phi3(hyper: Hyperparameters, config: Config) -> Config:
    """Long contexts have divisors of frequencies, for positions within the original context and beyond."""
    original = hyper.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    hidden, heads = config["hidden_size"], hyper.integer("attention.head_count")
    size = hyper.integer("rope.dimension_count", hidden // heads)
    found: Config = {
        "original_max_position_embeddings": original,
        "partial_rotary_factor": size * heads / hidden,
        "rope_theta": hyper.number("rope.freq_base", 10_000.0),
    }
    window = hyper.get("attention.sliding_window", 0)  # which published models do not use within their context
    if isinstance(window, int) and 0 < window < config["max_position_embeddings"] - 1:
        found["max_position_embeddings"] = window
    factors = {name: hyper.file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short")}
    if not any(factors.values()):
        return found
    hyper.get("rope.scaling.attn_factor")  # the model derives it from its two contexts
    hyper.refuse_unless("rope.scaling.type", "longrope", None)
    scaling: Config = {"type": "longrope", "rope_type": "longrope", "original_max_position_embeddings": original}
    for name, entry in factors.items():
        if entry is None or entry.shape != (size // 2,) or entry.type.name != "F32":
            raise ModelError(f"tensor 'rope_factors_{name}.weight' is missing, or no F32 of [{size // 2}]")
        entry.check_bounds()
        scaling[f"{name}_factor"] = [float(str(each)) for each in entry.rows(0, 1).view("<f4")[0]]
    return found | {"rope_scaling": scaling | {"factor": config["max_position_embeddings"] / original}}


def temperatures(hyper: Hyperparameters, config: Config) -> Config:
    """Mistral's: queries grow with the logarithm of their position, in contexts longer than the original one."""
    original = hyper.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    scale = hyper.number("attention.temperature_scale", 0.0)
    hyper.refuse_unless("attention.temperature_length", original)
    return {"llama_4_scaling_beta": scale, "original_max_position_embeddings": original}


def hunyuan(hyper: Hyperparameters, config: Config) -> Config:
    """The base of rotation is stated as the model ends up with it."""
    found: Config = {"rope_scaling": {"type": "dynamic", "alpha": 1.0, "factor": 1.0}}
    hyper.refuse_unless("rope.scaling.type", "none", None)
    hyper.refuse_unless("rope.scaling.factor", 1.0, 1)
    if not hyper.get("expert_count", 0):
        return found
    inner = expert_width(hyper)
    shared = hyper.integer("expert_shared_feed_forward_length", inner)
    if shared % inner:
        raise ModelError(f"{hyper.architecture}.expert_shared_feed_forward_length is {shared}, which is not supported")
    hyper.get("expert_shared_count")
    return found | {
        "intermediate_size": inner,
        "moe_intermediate_size": inner,
        "num_shared_expert": shared // inner,
        "use_mixed_mlp_moe": True,
        "use_cla": False,
        "cla_share_factor": 1,
    }
