"""What each GGUF architecture says about its model: the config mlx-lm wants, and every tensor there must be.

A new architecture is one function, here or in a file beside, and one line in ARCHITECTURES. A hyper-parameter that its
function does not read is refused by name: it would change what the model computes, and nobody honoured it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ingot.errors import ModelError, nearest
from ingot.models.gguf.blueprint import (
    HEAD_NORMS,
    LLAMA_NORMS,
    Blueprint,
    Sizes,
    attention,
    ends,
    mlps,
    norms,
    refuse_window,
    usual_config,
)
from ingot.models.gguf.deepseek import deepseek2
from ingot.models.gguf.glm import glm4_moe
from ingot.models.gguf.hyperparameters import Hyperparameters
from ingot.models.gguf.moe_architectures import gpt_oss, granite_moe, mixtral, olmoe, qwen2_moe, qwen3_moe
from ingot.models.gguf.parts import GGUFModel
from ingot.models.gguf.rope import rope_scaling

GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def blueprint(file: GGUFModel) -> Blueprint:
    """The model that a file describes. Raises ModelError for one that cannot be run as it is described."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(_unknown(architecture))
    hyper = Hyperparameters(file, architecture)
    hyper.refuse_unless("attention.causal", True)
    plan = ARCHITECTURES[architecture](hyper)
    hyper.refuse_unread()
    return plan


def _unknown(architecture: Any) -> str:
    known = ", ".join(ARCHITECTURES)
    near = nearest(str(architecture), ARCHITECTURES)
    hint = f" (nearest: {near})" if near else ""
    return f"GGUF files of the architecture {architecture!r} are not supported{hint}; supported are: {known}"


def _llama(hyper: Hyperparameters) -> Blueprint:
    if hyper.get("expert_count", 0):
        return mixtral(hyper)
    sizes = _dense_sizes(hyper)
    refuse_window(hyper)
    tensors = hyper.file.tensors
    attention_bias, mlp_bias = "blk.0.attn_q.bias" in tensors, "blk.0.ffn_up.bias" in tensors
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=usual_config(hyper, sizes, "llama", "LlamaForCausalLM")
        | {"head_dim": sizes.head, "attention_bias": attention_bias, "mlp_bias": mlp_bias, "hidden_act": "silu"}
        | scaling,
        tensors=(
            *ends(hyper, sizes),
            *attention(sizes, interleaved=True, biased=("q", "k", "v", "o") * attention_bias),
            *mlps(range(sizes.layers), sizes.hidden, sizes.inner, biased=mlp_bias),
            *norms(sizes.layers, LLAMA_NORMS, sizes.hidden),
        ),
        spent=spent,
    )


def _qwen2(hyper: Hyperparameters) -> Blueprint:
    sizes = _dense_sizes(hyper)
    refuse_window(hyper)
    if sizes.head * sizes.heads != sizes.hidden:
        raise ModelError(f"qwen2.attention.key_length is {sizes.head}, which is not embedding_length / head_count")
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=usual_config(hyper, sizes, "qwen2", "Qwen2ForCausalLM") | {"hidden_act": "silu"} | scaling,
        tensors=(
            *ends(hyper, sizes),
            *attention(sizes, biased=("q", "k", "v")),
            *mlps(range(sizes.layers), sizes.hidden, sizes.inner),
            *norms(sizes.layers, LLAMA_NORMS, sizes.hidden),
        ),
        spent=spent,
    )


def _qwen3(hyper: Hyperparameters) -> Blueprint:
    sizes = _dense_sizes(hyper)
    refuse_window(hyper)
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=usual_config(hyper, sizes, "qwen3", "Qwen3ForCausalLM")
        | {"head_dim": sizes.head, "attention_bias": False, "hidden_act": "silu"}
        | scaling,
        tensors=(
            *ends(hyper, sizes),
            *attention(sizes),
            *mlps(range(sizes.layers), sizes.hidden, sizes.inner),
            *norms(sizes.layers, LLAMA_NORMS, sizes.hidden),
            *norms(sizes.layers, HEAD_NORMS, sizes.head),
        ),
        spent=spent,
    )


def _gemma3(hyper: Hyperparameters) -> Blueprint:
    sizes = _dense_sizes(hyper)
    scaling, spent = rope_scaling(hyper, sizes.head)
    hyper.refuse_unless("final_logit_softcapping", 0.0)
    # The one size whose queries are scaled by the width per head rather than by the head's own width.
    scalar = sizes.hidden // sizes.heads if sizes.layers == 62 else sizes.head
    return Blueprint(
        config=usual_config(hyper, sizes, "gemma3_text", "Gemma3ForCausalLM")
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
            *ends(hyper, sizes, norms_plus_one=True),
            *attention(sizes),
            *mlps(range(sizes.layers), sizes.hidden, sizes.inner),
            *norms(sizes.layers, GEMMA_NORMS, sizes.hidden, plus_one=True),
            *norms(sizes.layers, HEAD_NORMS, sizes.head, plus_one=True),
        ),
        spent=spent,
    )


def _dense_sizes(hyper: Hyperparameters) -> Sizes:
    for key in ("expert_count", "expert_used_count"):
        hyper.refuse_unless(key, 0)
    sizes = Sizes.read(hyper)
    hyper.refuse_unless("rope.dimension_count", sizes.head)
    return sizes


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


ARCHITECTURES: dict[str, Callable[[Hyperparameters], Blueprint]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "qwen2moe": qwen2_moe,
    "qwen3moe": qwen3_moe,
    "olmoe": olmoe,
    "granitemoe": granite_moe,
    "gpt-oss": gpt_oss,
    "glm4moe": glm4_moe,
    "deepseek2": deepseek2,
}
