"""What each GGUF architecture says about its model: the config mlx-lm wants, and every tensor there must be.

A new architecture is one entry of DECODERS, or a function, here or in `moe_architectures`, in ARCHITECTURES. A
hyper-parameter that is not read is refused by name: it would change what the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ingot.errors import ModelError, nearest_name
from ingot.models.gguf.blueprint import (
    HEAD_NORMS,
    LLAMA_NORMS,
    Blueprint,
    DecoderSizes,
    WantedTensor,
    attention_tensors,
    common_config,
    end_tensors,
    mlp_tensors,
    norm_tensors,
    refuse_rope_scaling,
    refuse_sliding_window,
    rope_scaling,
    rotary_decoder_sizes,
)
from ingot.models.gguf.file import GGUFModel, Hyperparameters
from ingot.models.gguf.moe_architectures import (
    POST_NORMS,
    ExpertSpec,
    deepseek2_blueprint,
    glm4_moe_blueprint,
)

GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ConfigAndTensors = tuple[dict[str, Any], list[WantedTensor]]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """How an architecture differs from others of Llama's kind."""

    model_type: str
    class_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False  # rows of queries and keys come in interleaved rotary order
    biased: str = ""  # those of q, k, v and o that have biases
    detects_biases: bool = False  # some files have biases, of attention or of the MLP
    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    head_norms: Literal["head", "joint"] | None = None  # of queries and keys: each head's, or of all heads as one
    head_dim: bool = True  # heads may be of any size; else it must be embedding_length / head_count
    own_head: bool = False  # the model cannot share the embedding's weights with its output head
    scales_rope: bool = True
    has_windows: bool = False
    experts: ExpertSpec | None = None
    extra: Callable[[Hyperparameters, DecoderSizes], ConfigAndTensors] | None = None


def read_blueprint(file: GGUFModel) -> Blueprint:
    """The model that a file describes. Raises ModelError for one that cannot be run as it is described."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(_unknown_architecture(architecture))
    hyper = Hyperparameters(file, architecture)
    hyper.refuse_unless("attention.causal", True)
    plan = ARCHITECTURES[architecture](hyper)
    hyper.refuse_unread()
    return plan


def _unknown_architecture(architecture: Any) -> str:
    known = ", ".join(ARCHITECTURES)
    near = nearest_name(str(architecture), ARCHITECTURES)
    hint = f" (nearest: {near})" if near else ""
    return f"GGUF files of the architecture {architecture!r} are not supported{hint}; supported are: {known}"


def _decoder_blueprint(spec: DecoderSpec, hyper: Hyperparameters) -> Blueprint:
    sizes = rotary_decoder_sizes(hyper)
    if not spec.has_windows:
        refuse_sliding_window(hyper)
    config = {**common_config(hyper, sizes, spec.model_type, spec.class_name), **spec.config}
    if spec.head_dim:
        config["head_dim"] = sizes.head
    elif sizes.head * sizes.heads != sizes.hidden:
        raise ModelError(
            f"{hyper.architecture}.attention.key_length is {sizes.head}, which is not embedding_length / head_count"
        )
    biased, mlp_bias = spec.biased, False
    if spec.detects_biases:
        biased = "qkvo" if "blk.0.attn_q.bias" in hyper.file.tensors else ""
        mlp_bias = "blk.0.ffn_up.bias" in hyper.file.tensors
        config |= {"attention_bias": bool(biased), "mlp_bias": mlp_bias}
    if spec.experts is None:
        _refuse_experts(hyper)
        mlp = mlp_tensors(range(sizes.layers), sizes.hidden, sizes.inner, biased=mlp_bias)
    else:
        expert_config, mlp = spec.experts.read(hyper, sizes)
        config |= expert_config
    extra_config, extra = ({}, []) if spec.extra is None else spec.extra(hyper, sizes)
    scaling, spent = (
        rope_scaling(hyper, sizes.head) if spec.scales_rope else ({}, refuse_rope_scaling(hyper, sizes.head))
    )
    return Blueprint(
        config=config | extra_config | scaling,
        tensors=(
            *end_tensors(hyper, sizes, own_head=spec.own_head),
            *attention_tensors(sizes, interleaved=spec.interleaved, biased=biased),
            *mlp,
            *extra,
            *norm_tensors(sizes.layers, spec.norms, sizes.hidden),
            *_head_norm_tensors(spec, sizes),
        ),
        spent=spent,
    )


def _head_norm_tensors(spec: DecoderSpec, sizes: DecoderSizes) -> list[WantedTensor]:
    if spec.head_norms is None:
        return []
    counts = (1, 1) if spec.head_norms == "head" else (sizes.heads, sizes.kv_heads)
    return [
        tensor
        for (source, target), count in zip(HEAD_NORMS.items(), counts, strict=True)
        for tensor in norm_tensors(sizes.layers, {source: target}, count * sizes.head)
    ]


def _refuse_experts(hyper: Hyperparameters) -> None:
    for key in ("expert_count", "expert_used_count"):
        hyper.refuse_unless(key, 0)


def _llama_blueprint(hyper: Hyperparameters) -> Blueprint:
    return _decoder_blueprint(_MIXTRAL if hyper.get("expert_count", 0) else _LLAMA, hyper)


def _qwen2_shared_expert(hyper: Hyperparameters, sizes: DecoderSizes) -> ConfigAndTensors:
    shared, layers = hyper.integer("expert_shared_feed_forward_length", sizes.inner), range(sizes.layers)
    gates = [
        WantedTensor(
            f"blk.{layer}.ffn_gate_inp_shexp.weight",
            f"model.layers.{layer}.mlp.shared_expert_gate.weight",
            (sizes.hidden,),
            target_shape=(1, sizes.hidden),
        )
        for layer in layers
    ]
    experts = mlp_tensors(layers, sizes.hidden, shared, module="mlp.shared_expert", suffix="_shexp")
    return {"shared_expert_intermediate_size": shared}, [*experts, *gates]


def _olmoe_extra(hyper: Hyperparameters, sizes: DecoderSizes) -> ConfigAndTensors:
    hyper.refuse_unless("attention.clamp_kqv", 0.0)
    return {"intermediate_size": hyper.integer("expert_feed_forward_length", sizes.inner)}, []


def _granite_multipliers(hyper: Hyperparameters, sizes: DecoderSizes) -> ConfigAndTensors:
    hyper.refuse_unless("expert_shared_feed_forward_length", 0)
    return {
        "logits_scaling": hyper.number("logit_scale"),
        "attention_multiplier": hyper.number("attention.scale"),
        "embedding_multiplier": hyper.number("embedding_scale"),
        "residual_multiplier": hyper.number("residual_scale"),
    }, []


def _gpt_oss_windows_and_sinks(hyper: Hyperparameters, sizes: DecoderSizes) -> ConfigAndTensors:
    hyper.refuse_unless("attention.sliding_window_pattern", 2)
    config = {
        "sliding_window": hyper.integer("attention.sliding_window"),
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(sizes.layers)],
    }
    return config, [
        WantedTensor(f"blk.{layer}.attn_sinks.weight", f"model.layers.{layer}.self_attn.sinks", (sizes.heads,))
        for layer in range(sizes.layers)
    ]


def _gemma3_blueprint(hyper: Hyperparameters) -> Blueprint:
    sizes = rotary_decoder_sizes(hyper)
    _refuse_experts(hyper)
    scaling, spent = rope_scaling(hyper, sizes.head)
    hyper.refuse_unless("final_logit_softcapping", 0.0)
    # The one size whose queries are scaled by the width per head rather than by the head's own width.
    scalar = sizes.hidden // sizes.heads if sizes.layers == 62 else sizes.head
    return Blueprint(
        config=common_config(hyper, sizes, "gemma3_text", "Gemma3ForCausalLM")
        | {
            "head_dim": sizes.head,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "sliding_window": hyper.integer("attention.sliding_window"),
            "sliding_window_pattern": _window_pattern(hyper, sizes.layers),
            "rope_theta": hyper.number("rope.freq_base", 1_000_000.0),
            "rope_local_base_freq": hyper.number("rope.freq_base_swa", 10_000.0),
        }
        | scaling,
        tensors=(
            *end_tensors(hyper, sizes, norms_plus_one=True),
            *attention_tensors(sizes),
            *mlp_tensors(range(sizes.layers), sizes.hidden, sizes.inner),
            *norm_tensors(sizes.layers, GEMMA_NORMS, sizes.hidden, plus_one=True),
            *norm_tensors(sizes.layers, HEAD_NORMS, sizes.head, plus_one=True),
        ),
        spent=spent,
    )


def _window_pattern(hyper: Hyperparameters, layers: int) -> int:
    """Every how many layers one attends to everything. Files say it as a number, layer by layer, or not at all."""
    pattern = hyper.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        if len(pattern) != layers or all(pattern):
            raise ModelError(f"{hyper.architecture}.attention.sliding_window_pattern does not fit {layers} layers")
        period = pattern.index(False) + 1
        if pattern != [(layer + 1) % period != 0 for layer in range(layers)]:
            raise ModelError(f"{hyper.architecture}.attention.sliding_window_pattern is irregular: not supported")
        return period
    period = hyper.integer("attention.sliding_window_pattern", 6)
    if period > layers:
        raise ModelError(
            f"{hyper.architecture}.block_count is {layers}: a model without global layers is not supported"
        )
    return period


_SILU = {"hidden_act": "silu"}
_LLAMA = DecoderSpec("llama", "LlamaForCausalLM", _SILU, interleaved=True, detects_biases=True)
_MIXTRAL = DecoderSpec(
    "mixtral",
    "MixtralForCausalLM",
    _SILU | {"sliding_window": None},
    interleaved=True,
    head_dim=False,
    scales_rope=False,
    experts=ExpertSpec("block_sparse_moe.gate", "block_sparse_moe.switch_mlp", normalised=True, local=True),
)
DECODERS = {
    "qwen2": DecoderSpec("qwen2", "Qwen2ForCausalLM", _SILU, biased="qkv", head_dim=False),
    "qwen3": DecoderSpec("qwen3", "Qwen3ForCausalLM", _SILU | {"attention_bias": False}, head_norms="head"),
    "qwen2moe": DecoderSpec(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _SILU | {"norm_topk_prob": False, "tie_word_embeddings": False},
        biased="qkv",
        head_dim=False,
        own_head=True,
        scales_rope=False,
        experts=ExpertSpec("mlp.gate", "mlp.switch_mlp", normalised=False),
        extra=_qwen2_shared_expert,
    ),
    "qwen3moe": DecoderSpec(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _SILU | {"norm_topk_prob": True, "attention_bias": False},
        head_norms="head",
        scales_rope=False,
        experts=ExpertSpec("mlp.gate", "mlp.switch_mlp", normalised=True),
    ),
    "olmoe": DecoderSpec(
        "olmoe",
        "OlmoeForCausalLM",
        _SILU | {"norm_topk_prob": False},
        head_norms="joint",
        experts=ExpertSpec("mlp.gate", "mlp.switch_mlp", normalised=False),
        extra=_olmoe_extra,
    ),
    "granitemoe": DecoderSpec(
        "granitemoe",
        "GraniteMoeForCausalLM",
        _SILU | {"attention_bias": False},
        interleaved=True,
        head_dim=False,
        experts=ExpertSpec("block_sparse_moe.router.layer", "block_sparse_moe.switch_mlp", normalised=True, local=True),
        extra=_granite_multipliers,
    ),
    "gpt-oss": DecoderSpec(
        "gpt_oss",
        "GptOssForCausalLM",
        {"tie_word_embeddings": False},
        biased="qkvo",
        norms=POST_NORMS,
        own_head=True,
        has_windows=True,
        experts=ExpertSpec("mlp.router", "mlp.experts", normalised=True, local=True, biased=True),
        extra=_gpt_oss_windows_and_sinks,
    ),
}
ARCHITECTURES: dict[str, Callable[[Hyperparameters], Blueprint]] = {
    "llama": _llama_blueprint,
    "gemma3": _gemma3_blueprint,
    "glm4moe": glm4_moe_blueprint,
    "deepseek2": deepseek2_blueprint,
    **{name: partial(_decoder_blueprint, spec) for name, spec in DECODERS.items()},
}
