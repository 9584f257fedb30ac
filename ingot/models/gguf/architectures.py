"""What each GGUF architecture says about its model: the config mlx-lm wants, and every tensor there must be.

A new architecture is one function, here or in `moe_architectures`, and one line in ARCHITECTURES. A hyper-parameter
that its function does not read is refused by name: it would change what the model computes, and nobody honoured it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ingot.errors import ModelError, nearest_name
from ingot.models.gguf.blueprint import (
    HEAD_NORMS,
    LLAMA_NORMS,
    Blueprint,
    DecoderSizes,
    attention_tensors,
    common_config,
    end_tensors,
    mlp_tensors,
    norm_tensors,
    refuse_sliding_window,
    rope_scaling,
)
from ingot.models.gguf.file import GGUFModel, Hyperparameters
from ingot.models.gguf.moe_architectures import (
    deepseek2_blueprint,
    glm4_moe_blueprint,
    gpt_oss_blueprint,
    granite_moe_blueprint,
    mixtral_blueprint,
    olmoe_blueprint,
    qwen2_moe_blueprint,
    qwen3_moe_blueprint,
)

GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


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


def _llama_blueprint(hyper: Hyperparameters) -> Blueprint:
    if hyper.get("expert_count", 0):
        return mixtral_blueprint(hyper)
    sizes = _dense_sizes(hyper)
    refuse_sliding_window(hyper)
    tensors = hyper.file.tensors
    attention_bias, mlp_bias = "blk.0.attn_q.bias" in tensors, "blk.0.ffn_up.bias" in tensors
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=common_config(hyper, sizes, "llama", "LlamaForCausalLM")
        | {"head_dim": sizes.head, "attention_bias": attention_bias, "mlp_bias": mlp_bias, "hidden_act": "silu"}
        | scaling,
        tensors=(
            *end_tensors(hyper, sizes),
            *attention_tensors(sizes, interleaved=True, biased=("q", "k", "v", "o") * attention_bias),
            *mlp_tensors(range(sizes.layers), sizes.hidden, sizes.inner, biased=mlp_bias),
            *norm_tensors(sizes.layers, LLAMA_NORMS, sizes.hidden),
        ),
        spent=spent,
    )


def _qwen2_blueprint(hyper: Hyperparameters) -> Blueprint:
    sizes = _dense_sizes(hyper)
    refuse_sliding_window(hyper)
    if sizes.head * sizes.heads != sizes.hidden:
        raise ModelError(f"qwen2.attention.key_length is {sizes.head}, which is not embedding_length / head_count")
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=common_config(hyper, sizes, "qwen2", "Qwen2ForCausalLM") | {"hidden_act": "silu"} | scaling,
        tensors=(
            *end_tensors(hyper, sizes),
            *attention_tensors(sizes, biased=("q", "k", "v")),
            *mlp_tensors(range(sizes.layers), sizes.hidden, sizes.inner),
            *norm_tensors(sizes.layers, LLAMA_NORMS, sizes.hidden),
        ),
        spent=spent,
    )


def _qwen3_blueprint(hyper: Hyperparameters) -> Blueprint:
    sizes = _dense_sizes(hyper)
    refuse_sliding_window(hyper)
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=common_config(hyper, sizes, "qwen3", "Qwen3ForCausalLM")
        | {"head_dim": sizes.head, "attention_bias": False, "hidden_act": "silu"}
        | scaling,
        tensors=(
            *end_tensors(hyper, sizes),
            *attention_tensors(sizes),
            *mlp_tensors(range(sizes.layers), sizes.hidden, sizes.inner),
            *norm_tensors(sizes.layers, LLAMA_NORMS, sizes.hidden),
            *norm_tensors(sizes.layers, HEAD_NORMS, sizes.head),
        ),
        spent=spent,
    )


def _gemma3_blueprint(hyper: Hyperparameters) -> Blueprint:
    sizes = _dense_sizes(hyper)
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


def _dense_sizes(hyper: Hyperparameters) -> DecoderSizes:
    for key in ("expert_count", "expert_used_count"):
        hyper.refuse_unless(key, 0)
    sizes = DecoderSizes.read(hyper)
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
    "llama": _llama_blueprint,
    "qwen2": _qwen2_blueprint,
    "qwen3": _qwen3_blueprint,
    "gemma3": _gemma3_blueprint,
    "qwen2moe": qwen2_moe_blueprint,
    "qwen3moe": qwen3_moe_blueprint,
    "olmoe": olmoe_blueprint,
    "granitemoe": granite_moe_blueprint,
    "gpt-oss": gpt_oss_blueprint,
    "glm4moe": glm4_moe_blueprint,
    "deepseek2": deepseek2_blueprint,
}
