"""GLM 4.5 in GGUF files: a mixture, and behind its last layer the head that guesses further tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ingot.errors import ModelError
from ingot.models.gguf.blueprint import (
    HEAD_NORMS,
    Blueprint,
    Sizes,
    Wanted,
    attention,
    ends,
    norms,
    refuse_window,
    usual_config,
)
from ingot.models.gguf.hyperparameters import Hyperparameters
from ingot.models.gguf.moe_architectures import POST_NORMS, SIGMOID, shared_mixture, unscaled

NEXTN_NORMS = {"enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}


def glm4_moe(hyper: Hyperparameters) -> Blueprint:
    whole = Sizes.read(hyper)
    rotated = hyper.integer("rope.dimension_count", whole.head)
    ahead = hyper.get("nextn_predict_layers", 0)  # layers behind the last, which propose tokens
    if not isinstance(ahead, int) or not 0 <= ahead < whole.layers:
        raise ModelError(f"{hyper.architecture}.nextn_predict_layers is {ahead!r} of {whole.layers} layers")
    sizes = replace(whole, layers=whole.layers - ahead)
    refuse_window(hyper)
    routing, layers = _glm_layers(hyper, sizes)
    head = _glm_head(hyper, sizes) if ahead else []
    tensors, written = hyper.file.tensors, {name for item in head for name, _ in item.sources(hyper.file.tensors)}
    behind = tuple(f"blk.{layer}." for layer in range(sizes.layers, whole.layers))
    normed, biased = _glm_traits(hyper)
    return Blueprint(
        config=usual_config(hyper, sizes, "glm4_moe", "Glm4MoeForCausalLM")
        | routing
        | {"head_dim": sizes.head, "partial_rotary_factor": rotated / sizes.head, "use_qk_norm": normed}
        | {"attention_bias": biased, "rope_scaling": None, "tie_word_embeddings": False},
        tensors=(*ends(hyper, sizes, own_head=True), *layers, *head),
        spent=unscaled(hyper, sizes, rotated) | {name for name in tensors if name.startswith(behind)} - written,
    )


def _glm_traits(hyper: Hyperparameters) -> tuple[bool, bool]:
    """Whether queries and keys are normed, and whether their projections have biases."""
    return "blk.0.attn_q_norm.weight" in hyper.file.tensors, "blk.0.attn_q.bias" in hyper.file.tensors


def _glm_layers(hyper: Hyperparameters, sizes: Sizes) -> tuple[dict[str, Any], list[Wanted]]:
    normed, biased = _glm_traits(hyper)
    routing, experts = shared_mixture(hyper, SIGMOID, sizes.hidden, sizes.inner, sizes.layers)
    return routing, [
        *attention(sizes, biased=("q", "k", "v") * biased),
        *experts,
        *norms(sizes.layers, POST_NORMS, sizes.hidden),
        *norms(sizes.layers, HEAD_NORMS if normed else {}, sizes.head),
    ]


def _glm_head(hyper: Hyperparameters, sizes: Sizes) -> list[Wanted]:
    """The first layer behind the last, with the parts that make a head of it; nothing where the file has no whole one.
    Its embedding and output head, if it has them, repeat the model's."""
    block, module = f"blk.{sizes.layers}.", f"model.layers.{sizes.layers}"
    _, layers = _glm_layers(hyper, replace(sizes, layers=sizes.layers + 1))
    parts = [
        Wanted(f"{block}nextn.eh_proj.weight", f"{module}.eh_proj.weight", (sizes.hidden, 2 * sizes.hidden)),
        *(
            Wanted(f"{block}nextn.{source}.weight", f"{module}.{target}.weight", (sizes.hidden,))
            for source, target in NEXTN_NORMS.items()
        ),
    ]
    wanted = [*(item for item in layers if item.source.startswith(block)), *parts]
    there = hyper.file.tensors
    return wanted if all(name in there for item in wanted for name, _ in item.sources(there)) else []
