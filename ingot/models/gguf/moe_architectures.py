"""GGUF architectures whose layers choose among experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import ModelError
from ingot.models.gguf.blueprint import (
    HEAD_NORMS,
    LLAMA_NORMS,
    Blueprint,
    Sizes,
    Wanted,
    attention,
    ends,
    mlps,
    norms,
    refuse_window,
    usual_config,
)
from ingot.models.gguf.hyperparameters import Hyperparameters
from ingot.models.gguf.rope import rope_scaling

SOFTMAX, SIGMOID = 1, 2  # how files number the router's function
POST_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


@dataclass(frozen=True, slots=True)
class Mixture:
    """How many experts a layer has, how many of them see a token, and how wide each is."""

    experts: int
    used: int
    inner: int

    @classmethod
    def read(cls, hyper: Hyperparameters, inner: int) -> Mixture:
        """`inner` is what an expert's width is where the file does not say. Raises ModelError."""
        return cls(
            experts=hyper.integer("expert_count"),
            used=hyper.integer("expert_used_count"),
            inner=hyper.integer("expert_feed_forward_length", inner),
        )

    def tensors(
        self, layers: Sequence[int], hidden: int, *, router: str, module: str, biased: bool = False, plain: bool = False
    ) -> list[Wanted]:
        """The routers and the experts of these layers; `plain`: the model's router is no linear layer of its own."""
        wanted = mlps(layers, hidden, self.inner, module=module, suffix="_exps", experts=self.experts, biased=biased)
        for layer in layers:
            source, target = f"blk.{layer}.ffn_gate_inp", f"model.layers.{layer}.{router}"
            wanted.append(Wanted(f"{source}.weight", f"{target}.weight", (self.experts, hidden), plain=plain))
            if biased:
                wanted.append(Wanted(f"{source}.bias", f"{target}.bias", (self.experts,)))
        return wanted


def mixtral(hyper: Hyperparameters) -> Blueprint:
    """A llama file with experts."""
    sizes = _sizes(hyper)
    refuse_window(hyper)
    _refuse_other_heads(hyper, sizes)
    _refuse_routing(hyper, norm=True)
    mixture = Mixture.read(hyper, sizes.inner)
    return Blueprint(
        config=usual_config(hyper, sizes, "mixtral", "MixtralForCausalLM")
        | {"intermediate_size": mixture.inner, "num_local_experts": mixture.experts, "hidden_act": "silu"}
        | {"num_experts_per_tok": mixture.used, "sliding_window": None},
        tensors=(
            *ends(hyper, sizes),
            *attention(sizes, interleaved=True),
            *mixture.tensors(
                range(sizes.layers),
                sizes.hidden,
                router="block_sparse_moe.gate",
                module="block_sparse_moe.switch_mlp",
            ),
            *norms(sizes.layers, LLAMA_NORMS, sizes.hidden),
        ),
        spent=unscaled(hyper, sizes),
    )


def qwen2_moe(hyper: Hyperparameters) -> Blueprint:
    sizes = _sizes(hyper)
    refuse_window(hyper)
    _refuse_other_heads(hyper, sizes)
    _refuse_routing(hyper, norm=False)
    mixture, layers = Mixture.read(hyper, sizes.inner), range(sizes.layers)
    shared = hyper.integer("expert_shared_feed_forward_length", sizes.inner)
    gates = [
        Wanted(
            f"blk.{layer}.ffn_gate_inp_shexp.weight",
            f"model.layers.{layer}.mlp.shared_expert_gate.weight",
            (sizes.hidden,),
            held=(1, sizes.hidden),
        )
        for layer in layers
    ]
    return Blueprint(
        config=usual_config(hyper, sizes, "qwen2_moe", "Qwen2MoeForCausalLM")
        | _counted(mixture)
        | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False, "tie_word_embeddings": False},
        tensors=(
            *ends(hyper, sizes, own_head=True),
            *attention(sizes, biased=("q", "k", "v")),
            *mixture.tensors(layers, sizes.hidden, router="mlp.gate", module="mlp.switch_mlp"),
            *mlps(layers, sizes.hidden, shared, module="mlp.shared_expert", suffix="_shexp"),
            *gates,
            *norms(sizes.layers, LLAMA_NORMS, sizes.hidden),
        ),
        spent=unscaled(hyper, sizes),
    )


def qwen3_moe(hyper: Hyperparameters) -> Blueprint:
    sizes = _sizes(hyper)
    refuse_window(hyper)
    _refuse_routing(hyper, norm=True)
    mixture = Mixture.read(hyper, sizes.inner)
    return Blueprint(
        config=usual_config(hyper, sizes, "qwen3_moe", "Qwen3MoeForCausalLM")
        | _counted(mixture)
        | {"head_dim": sizes.head, "norm_topk_prob": True, "attention_bias": False},
        tensors=(
            *ends(hyper, sizes),
            *attention(sizes),
            *mixture.tensors(range(sizes.layers), sizes.hidden, router="mlp.gate", module="mlp.switch_mlp"),
            *norms(sizes.layers, LLAMA_NORMS, sizes.hidden),
            *norms(sizes.layers, HEAD_NORMS, sizes.head),
        ),
        spent=unscaled(hyper, sizes),
    )


def olmoe(hyper: Hyperparameters) -> Blueprint:
    sizes = _sizes(hyper)
    refuse_window(hyper)
    _refuse_routing(hyper, norm=False)
    hyper.refuse_unless("attention.clamp_kqv", 0.0)
    mixture = Mixture.read(hyper, sizes.inner)
    scaling, spent = rope_scaling(hyper, sizes.head)
    of_queries, of_keys = ({source: target} for source, target in HEAD_NORMS.items())
    return Blueprint(
        config=usual_config(hyper, sizes, "olmoe", "OlmoeForCausalLM")
        | _counted(mixture)
        | {"intermediate_size": mixture.inner, "head_dim": sizes.head, "norm_topk_prob": False}
        | scaling,
        tensors=(
            *ends(hyper, sizes),
            *attention(sizes),
            *mixture.tensors(range(sizes.layers), sizes.hidden, router="mlp.gate", module="mlp.switch_mlp"),
            *norms(sizes.layers, LLAMA_NORMS, sizes.hidden),
            *norms(sizes.layers, of_queries, sizes.heads * sizes.head),
            *norms(sizes.layers, of_keys, sizes.kv_heads * sizes.head),
        ),
        spent=spent,
    )


def granite_moe(hyper: Hyperparameters) -> Blueprint:
    sizes = _sizes(hyper)
    refuse_window(hyper)
    _refuse_other_heads(hyper, sizes)
    _refuse_routing(hyper, norm=True)
    hyper.refuse_unless("expert_shared_feed_forward_length", 0)
    mixture = Mixture.read(hyper, sizes.inner)
    scaling, spent = rope_scaling(hyper, sizes.head)
    return Blueprint(
        config=usual_config(hyper, sizes, "granitemoe", "GraniteMoeForCausalLM")
        | {"intermediate_size": mixture.inner, "num_local_experts": mixture.experts, "hidden_act": "silu"}
        | {"num_experts_per_tok": mixture.used, "attention_bias": False}
        | {
            "logits_scaling": hyper.number("logit_scale"),
            "attention_multiplier": hyper.number("attention.scale"),
            "embedding_multiplier": hyper.number("embedding_scale"),
            "residual_multiplier": hyper.number("residual_scale"),
        }
        | scaling,
        tensors=(
            *ends(hyper, sizes),
            *attention(sizes, interleaved=True),
            *mixture.tensors(
                range(sizes.layers),
                sizes.hidden,
                router="block_sparse_moe.router.layer",
                module="block_sparse_moe.switch_mlp",
            ),
            *norms(sizes.layers, LLAMA_NORMS, sizes.hidden),
        ),
        spent=spent,
    )


def gpt_oss(hyper: Hyperparameters) -> Blueprint:
    sizes = _sizes(hyper)
    _refuse_routing(hyper, norm=True)
    hyper.refuse_unless("attention.sliding_window_pattern", 2)
    mixture = Mixture.read(hyper, sizes.inner)
    scaling, spent = rope_scaling(hyper, sizes.head)
    sinks = [
        Wanted(f"blk.{layer}.attn_sinks.weight", f"model.layers.{layer}.self_attn.sinks", (sizes.heads,))
        for layer in range(sizes.layers)
    ]
    return Blueprint(
        config=usual_config(hyper, sizes, "gpt_oss", "GptOssForCausalLM")
        | {"intermediate_size": mixture.inner, "num_local_experts": mixture.experts, "head_dim": sizes.head}
        | {"num_experts_per_tok": mixture.used, "tie_word_embeddings": False}
        | {
            "sliding_window": hyper.integer("attention.sliding_window"),
            "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(sizes.layers)],
        }
        | scaling,
        tensors=(
            *ends(hyper, sizes, own_head=True),
            *attention(sizes, biased=("q", "k", "v", "o")),
            *sinks,
            *mixture.tensors(range(sizes.layers), sizes.hidden, router="mlp.router", module="mlp.experts", biased=True),
            *norms(sizes.layers, POST_NORMS, sizes.hidden),
        ),
        spent=spent,
    )


def shared_mixture(
    hyper: Hyperparameters, gating: int, hidden: int, inner: int, layers: int
) -> tuple[dict[str, Any], list[Wanted]]:
    """The mixtures of DeepSeek and GLM 4.5: the first layers dense, then experts for all tokens beside those that are
    chosen, by a softmax or by a sigmoid and a bias (`gating`). The config's part and the tensors."""
    mixture, shared = Mixture.read(hyper, inner), hyper.integer("expert_shared_count", 1)
    hyper.refuse_unless("expert_gating_func", gating)
    hyper.refuse_unless("expert_shared_feed_forward_length", shared * mixture.inner)
    dense, groups = hyper.get("leading_dense_block_count", 0), hyper.integer("expert_group_count", 1)
    if not isinstance(dense, int) or not 0 <= dense <= layers:
        raise ModelError(f"{hyper.architecture}.leading_dense_block_count is {dense!r} of {layers} layers")
    if gating == SOFTMAX:
        hyper.refuse_unless("expert_weights_norm", False)
    chosen = range(dense, layers)
    config = {
        "moe_intermediate_size": mixture.inner,
        "n_routed_experts": mixture.experts,
        "num_experts_per_tok": mixture.used,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "n_group": groups,
        "topk_group": hyper.integer("expert_group_used_count", 1),
        "routed_scaling_factor": hyper.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(hyper.get("expert_weights_norm", False)),
        "scoring_func": "sigmoid" if gating == SIGMOID else "softmax",
        "topk_method": "noaux_tc" if gating == SIGMOID else "group_limited_greedy" if groups > 1 else "greedy",
    }
    biases = [
        Wanted(
            f"blk.{layer}.exp_probs_b.bias",
            f"model.layers.{layer}.mlp.gate.e_score_correction_bias",
            (mixture.experts,),
        )
        for layer in chosen
        if gating == SIGMOID
    ]
    return config, [
        *mlps(range(dense), hidden, inner),
        *mixture.tensors(chosen, hidden, router="mlp.gate", module="mlp.switch_mlp", plain=True),
        *mlps(chosen, hidden, mixture.inner * shared, module="mlp.shared_experts", suffix="_shexp"),
        *biases,
    ]


def _sizes(hyper: Hyperparameters) -> Sizes:
    sizes = Sizes.read(hyper)
    hyper.refuse_unless("rope.dimension_count", sizes.head)
    return sizes


def _counted(mixture: Mixture) -> dict[str, Any]:
    return {
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.used,
        "moe_intermediate_size": mixture.inner,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
    }


def _refuse_routing(hyper: Hyperparameters, *, norm: bool) -> None:
    """Routers of one kind: a softmax over all experts, whose chosen shares are made to sum to one, or (`norm`) not."""
    hyper.refuse_unless("expert_gating_func", SOFTMAX)
    hyper.refuse_unless("expert_weights_scale", 1.0, 0.0)
    hyper.refuse_unless("expert_weights_norm", norm)
    hyper.refuse_unless("expert_group_count", 1, 0)
    hyper.refuse_unless("expert_group_used_count", 1, 0)
    hyper.refuse_unless("leading_dense_block_count", 0)


def _refuse_other_heads(hyper: Hyperparameters, sizes: Sizes) -> None:
    if sizes.head * sizes.heads != sizes.hidden:
        raise ModelError(
            f"{hyper.architecture}.attention.key_length is {sizes.head}, which is not embedding_length / head_count"
        )


def unscaled(hyper: Hyperparameters, sizes: Sizes, rotated: int | None = None) -> frozenset[str]:
    """The tensors that say how positions are scaled, of a model that cannot scale them. Raises ModelError."""
    scaling, spent = rope_scaling(hyper, rotated or sizes.head)
    if scaling:
        kind = scaling["rope_scaling"]["rope_type"]
        raise ModelError(f"the file scales rotary positions ({kind}), which is not supported for {hyper.architecture}")
    return spent
