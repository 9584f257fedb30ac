"""The config that mlx-lm wants, from the hyper-parameters in a GGUF file.

What a key of a file is called in configs is one table for all architectures. A key is honoured if the model's arguments
have one of its names, and else refused, unless its value changes nothing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ingot.errors import ModelError
from ingot.models.gguf.blueprint import rope_scaling
from ingot.models.gguf.file import Hyperparameters
from ingot.upstream import model_classes

NAMES: dict[str, tuple[str, ...]] = {
    "feed_forward_length": ("intermediate_size", "intermediate_size_mlp"),
    "attention.head_count": ("num_attention_heads",),
    "attention.layer_norm_rms_epsilon": (
        *("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"),
    ),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window", "sliding_window_size"),
    "attention.scale": ("attention_multiplier",),
    "attention.temperature_scale": ("llama_4_scaling_beta",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "use_parallel_residual": ("use_parallel_residual",),
    "altup.num_inputs": ("altup_num_inputs",),
    "altup.active_idx": ("altup_active_idx",),
    "full_attention_interval": ("full_attention_interval",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    "expert_shared_count": (
        *("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    ),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": ("norm_topk_prob", "route_norm"),
    "expert_group_count": ("n_group", "num_expert_group"),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "moe_latent_size": ("moe_latent_size",),
}
# Values with which a model computes what it would without the setting; an absent key has the first.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "attention.clamp_kqv": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_group_count": (1, 0),
    "expert_group_used_count": (1, 0),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (1.0, 0.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
}
SCALES = frozenset({"expert_weights_scale", "attention.scale"})  # in which zero says that there is none


def argument_names(model_type: str) -> frozenset[str]:
    """What mlx-lm's arguments for such a model are called, of its language model too."""
    model_class, args_class = model_classes(config={"model_type": model_type})
    modules = {sys.modules[each.__module__] for each in (*model_class.__mro__, args_class)}
    classes = [
        item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, type) and dataclasses.is_dataclass(item) and item.__module__.startswith("mlx_lm.models.")
    ]
    return frozenset(field.name for item in classes for field in dataclasses.fields(item))


def read_sizes(hyper: Hyperparameters) -> dict[str, Any]:
    """What every model has. Raises ModelError."""
    ahead, layers = hyper.get("nextn_predict_layers", 0), hyper.integer("block_count")  # `ahead` are of a draft head
    if layers > len(hyper.file.tensors):
        raise ModelError(f"{hyper.architecture}.block_count is {layers}, more than the file has tensors")
    if not isinstance(ahead, int) or not 0 <= ahead < layers:
        raise ModelError(f"{hyper.architecture}.nextn_predict_layers is {ahead!r} of {layers} layers")
    embedding = hyper.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the file lacks the tensor 'token_embd.weight'")
    hyper.get("vocab_size")  # the embedding's shape is what counts
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hyper.integer("embedding_length"),
        "num_hidden_layers": layers - ahead,
        "max_position_embeddings": hyper.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in hyper.file.tensors,
    }


def read_heads(hyper: Hyperparameters, hidden: int, names: frozenset[str]) -> dict[str, Any]:
    """The heads of attention whose queries, keys and values are equally wide. Raises ModelError."""
    heads = hyper.integer("attention.head_count")
    head = hyper.integer("attention.key_length", hidden // heads)
    hyper.refuse_unless("attention.value_length", head)
    if "head_dim" not in names and head * heads != hidden:
        raise ModelError(
            f"{hyper.architecture}.attention.key_length is {head}, which is not embedding_length / head_count"
        )
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": hyper.integer("attention.head_count_kv", heads),
        "head_dim": head,
    }


def read_rope(
    hyper: Hyperparameters,
    rotated: int,
    names: frozenset[str],
    *,
    theta: float,
    scales: bool,
    growth: Callable[[float], dict[str, Any]] | None,
) -> tuple[dict[str, Any], frozenset[str]]:
    """The config's part, and the tensors that it was read from. `rotated` is how much of a head could be rotated at
    most. Raises ModelError."""
    theta, size = hyper.number("rope.freq_base", theta), hyper.integer("rope.dimension_count", rotated)
    partial = names & {"partial_rotary_factor", "rotary_dim"}
    if size != rotated and (not partial or size > rotated):
        raise ModelError(f"{hyper.architecture}.rope.dimension_count is {size}, which is not supported")
    scaling, spent = rope_scaling(hyper, size, growth=growth)
    if scaling and not scales:
        kind = scaling["rope_scaling"]["rope_type"]
        raise ModelError(f"the file scales rotary positions ({kind}), which is not supported for {hyper.architecture}")
    config = {"rope_theta": theta, **scaling}
    if partial:
        config |= {"partial_rotary_factor": size / rotated, "rotary_dim": size}
    if "rope_parameters" in names:
        stated = {"rope_type": "default", **scaling.get("rope_scaling", {})}
        if partial:
            stated["partial_rotary_factor"] = size / rotated
        config["rope_parameters"] = {"rope_theta": theta, "type": stated["rope_type"], **stated}
    return config, spent


def read_named(hyper: Hyperparameters, names: frozenset[str], described: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in `NAMES`, but for those that the config describes already. Raises ModelError for one that the
    model cannot honour."""
    config: dict[str, Any] = {}
    for key, candidates in NAMES.items():
        taken = names.intersection(candidates)
        if not taken:
            if key in WITHOUT_EFFECT and not hyper.was_read(key):
                hyper.refuse_unless(key, *WITHOUT_EFFECT[key])
        elif open_names := taken - described.keys():
            value = hyper.setting(key)
            if value is not None and not (key in SCALES and value == 0):
                config |= dict.fromkeys(open_names, value)
        else:
            hyper.get(key)
    return config


def read_biases(hyper: Hyperparameters, names: frozenset[str]) -> dict[str, Any]:
    """Settings that no key states, but the tensors that are there."""
    ends = {name.split(".", 2)[-1] for name in hyper.file.tensors}
    attention, mlp = "attn_q.bias" in ends or "attn_qkv.bias" in ends, "ffn_up.bias" in ends
    normed = "attn_q_norm.weight" in ends
    found = {
        **dict.fromkeys(("attention_bias", "use_qkv_bias"), attention),
        "attention_out_bias": "attn_output.bias" in ends,
        "mlp_bias": mlp,
        "use_bias": attention or mlp,
        **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), normed),
    }
    return {name: value for name, value in found.items() if name in names}


def layer_kinds(hyper: Hyperparameters, layers: int, period: int) -> list[str] | None:
    """The kind of each layer, by the names of transformers; None without windows. Files say it layer by layer, as every
    how many layers one attends to everything, or not at all, which is `period`. Raises ModelError."""
    pattern = hyper.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) < layers:
            raise ModelError(f"{hyper.architecture}.attention.sliding_window_pattern does not fit {layers} layers")
        sliding = [bool(each) for each in pattern[:layers]]
    else:
        period = hyper.integer("attention.sliding_window_pattern", period)
        sliding = [(layer + 1) % period != 0 for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in sliding]


def window_period(hyper: Hyperparameters, layers: int, period: int) -> int:
    """Every how many layers one attends to everything, for models that can have no other pattern. Raises ModelError."""
    kinds = layer_kinds(hyper, layers, period)
    if kinds is None or "full_attention" not in kinds:
        raise ModelError(
            f"{hyper.architecture}.block_count is {layers}: a model without global layers is not supported"
        )
    found = kinds.index("full_attention") + 1
    if kinds != [("full_attention" if (layer + 1) % found == 0 else "sliding_attention") for layer in range(layers)]:
        raise ModelError(f"{hyper.architecture}.attention.sliding_window_pattern is irregular: not supported")
    return found


def refuse_sliding_window(hyper: Hyperparameters) -> None:
    window = hyper.get("attention.sliding_window", 0)
    if window and window < hyper.integer("context_length"):
        raise ModelError(
            f"{hyper.architecture}.attention.sliding_window is {window}: sliding-window attention is not "
            f"supported for {hyper.architecture} models"
        )
