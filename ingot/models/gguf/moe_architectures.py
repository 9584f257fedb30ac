"""GGUF architectures with mixtures of experts: the experts that most have, and DeepSeek V2 and V3 and GLM 4.5.

Each function returns the blueprint of a file, or raises ModelError for one that cannot be run as it describes itself.
DeepSeek's attention is latent (MLA): keys and values are projected from one narrow vector a token. Behind GLM's last
layer there may be a draft head (MTP).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ingot.errors import ModelError
from ingot.models.gguf.blueprint import (
    HEAD_NORMS,
    LLAMA_NORMS,
    Blueprint,
    DecoderSizes,
    WantedTensor,
    attention_tensors,
    common_config,
    end_tensors,
    layer_count,
    mlp_tensors,
    norm_tensors,
    refuse_rope_scaling,
    refuse_sliding_window,
    rope_scaling,
    vocabulary_size,
)
from ingot.models.gguf.file import Hyperparameters

SOFTMAX, SIGMOID = 1, 2  # how files number the router's function
NEXTN_NORMS = {"enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}
POST_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


@dataclass(frozen=True, slots=True)
class MoeSizes:
    """How many experts a layer has, how many a token is routed to, and how wide each is."""

    experts: int
    used: int
    inner: int

    @classmethod
    def read(cls, hyper: Hyperparameters, inner: int) -> MoeSizes:
        """`inner` is an expert's width where the file does not state it. Raises ModelError."""
        return cls(
            experts=hyper.integer("expert_count"),
            used=hyper.integer("expert_used_count"),
            inner=hyper.integer("expert_feed_forward_length", inner),
        )

    def tensors(
        self, layers: Sequence[int], hidden: int, *, router: str, module: str, biased: bool = False, plain: bool = False
    ) -> list[WantedTensor]:
        """The routers and the experts of these layers; `plain`: the model's router is no linear layer of its own."""
        wanted = mlp_tensors(
            layers, hidden, self.inner, module=module, suffix="_exps", experts=self.experts, biased=biased
        )
        for layer in layers:
            source, target = f"blk.{layer}.ffn_gate_inp", f"model.layers.{layer}.{router}"
            wanted.append(WantedTensor(f"{source}.weight", f"{target}.weight", (self.experts, hidden), plain=plain))
            if biased:
                wanted.append(WantedTensor(f"{source}.bias", f"{target}.bias", (self.experts,)))
        return wanted


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Experts in all layers, behind a router with a softmax over all of them."""

    router: str
    module: str
    normalised: bool  # the weights of the chosen experts are made to sum to one
    local: bool = False  # the config has Mixtral's names, not Qwen's
    biased: bool = False

    def read(self, hyper: Hyperparameters, sizes: DecoderSizes) -> tuple[dict[str, Any], list[WantedTensor]]:
        """The config's part and the tensors. Raises ModelError for other kinds of routers."""
        hyper.refuse_unless("expert_gating_func", SOFTMAX)
        hyper.refuse_unless("expert_weights_scale", 1.0, 0.0)
        hyper.refuse_unless("expert_weights_norm", self.normalised)
        hyper.refuse_unless("expert_group_count", 1, 0)
        hyper.refuse_unless("expert_group_used_count", 1, 0)
        hyper.refuse_unless("leading_dense_block_count", 0)
        moe = MoeSizes.read(hyper, sizes.inner)
        config: dict[str, Any] = {"num_experts_per_tok": moe.used}
        if self.local:
            config |= {"intermediate_size": moe.inner, "num_local_experts": moe.experts}
        else:
            config |= {"moe_intermediate_size": moe.inner, "num_experts": moe.experts}
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
        return config, moe.tensors(
            range(sizes.layers), sizes.hidden, router=self.router, module=self.module, biased=self.biased
        )


def shared_expert_moe(
    hyper: Hyperparameters, gating: int, hidden: int, inner: int, layers: int
) -> tuple[dict[str, Any], list[WantedTensor]]:
    """The experts of DeepSeek and GLM 4.5: the first layers dense, then shared experts and ones that are chosen by a
    softmax, or by a sigmoid and a bias (`gating`). The config's part and the tensors."""
    mixture, shared = MoeSizes.read(hyper, inner), hyper.integer("expert_shared_count", 1)
    hyper.refuse_unless("expert_gating_func", gating)
    hyper.refuse_unless("expert_shared_feed_forward_length", shared * mixture.inner)
    dense, groups = hyper.get("leading_dense_block_count", 0), hyper.integer("expert_group_count", 1)
    if not isinstance(dense, int) or not 0 <= dense <= layers:
        raise ModelError(f"{hyper.architecture}.leading_dense_block_count is {dense!r} of {layers} layers")
    if gating == SOFTMAX:
        hyper.refuse_unless("expert_weights_norm", False)
    moe_layers = range(dense, layers)
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
        WantedTensor(
            f"blk.{layer}.exp_probs_b.bias",
            f"model.layers.{layer}.mlp.gate.e_score_correction_bias",
            (mixture.experts,),
        )
        for layer in moe_layers
        if gating == SIGMOID
    ]
    return config, [
        *mlp_tensors(range(dense), hidden, inner),
        *mixture.tensors(moe_layers, hidden, router="mlp.gate", module="mlp.switch_mlp", plain=True),
        *mlp_tensors(moe_layers, hidden, mixture.inner * shared, module="mlp.shared_experts", suffix="_shexp"),
        *biases,
    ]


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The sizes of latent attention: of a head, but for the ranks."""

    queries: int | None  # the rank that queries go through; None: they do not
    rank: int
    rotated: int
    plain: int
    values: int

    @classmethod
    def read(cls, hyper: Hyperparameters) -> LatentSizes:
        """Files with absorbed projections state a head's own sizes under other names."""
        rank, rotated = hyper.integer("attention.kv_lora_rank"), hyper.integer("rope.dimension_count")
        key, value = hyper.integer("attention.key_length"), hyper.integer("attention.value_length")
        key = hyper.integer("attention.key_length_mla", key)
        if key <= rotated:
            raise ModelError(f"{hyper.architecture}.rope.dimension_count is {rotated} of keys of {key}")
        queries = hyper.integer("attention.q_lora_rank") if hyper.get("attention.q_lora_rank") else None
        return cls(queries, rank, rotated, key - rotated, hyper.integer("attention.value_length_mla", value))

    @property
    def config(self) -> dict[str, Any]:
        return {
            "q_lora_rank": self.queries,
            "kv_lora_rank": self.rank,
            "qk_rope_head_dim": self.rotated,
            "qk_nope_head_dim": self.plain,
            "v_head_dim": self.values,
            "attention_bias": False,
        }


def deepseek2_blueprint(hyper: Hyperparameters) -> Blueprint:
    latent = LatentSizes.read(hyper)
    heads, inner = hyper.integer("attention.head_count"), hyper.integer("feed_forward_length")
    hyper.get("attention.head_count_kv")  # one where projections are absorbed into queries; head_count is what counts
    sizes = DecoderSizes(
        hyper.integer("embedding_length"),
        inner,
        layer_count(hyper),
        heads,
        heads,
        latent.rotated,
        vocabulary_size(hyper),
    )
    newer = hyper.get("expert_gating_func", SOFTMAX) == SIGMOID
    routing, experts = shared_expert_moe(hyper, SIGMOID if newer else SOFTMAX, sizes.hidden, inner, sizes.layers)
    scaling, spent = rope_scaling(hyper, latent.rotated, scales_attention=True)
    if not scaling and not newer:
        scaling = {"rope_scaling": {"type": "yarn", "factor": 1.0}}  # which is none: its model needs some scaling
    version = 3 if newer else 2
    return Blueprint(
        config=common_config(hyper, sizes, f"deepseek_v{version}", f"DeepseekV{version}ForCausalLM")
        | latent.config
        | routing
        | {"moe_layer_freq": 1, "tie_word_embeddings": False}
        | scaling,
        tensors=(
            *end_tensors(hyper, sizes, own_head=True),
            *(
                item
                for layer in range(sizes.layers)
                for item in _latent_attention(hyper, latent, sizes, layer, newer=newer)
            ),
            *experts,
            *norm_tensors(sizes.layers, LLAMA_NORMS, sizes.hidden),
        ),
        spent=spent,
    )


def _latent_attention(
    hyper: Hyperparameters, latent: LatentSizes, sizes: DecoderSizes, layer: int, *, newer: bool
) -> list[WantedTensor]:
    block, module = f"blk.{layer}", f"model.layers.{layer}.self_attn"
    wide = sizes.heads * (latent.plain + latent.rotated)
    wanted = [
        WantedTensor(
            f"{block}.attn_kv_a_mqa.weight",
            f"{module}.kv_a_proj_with_mqa.weight",
            (latent.rank + latent.rotated, sizes.hidden),
        ),
        WantedTensor(f"{block}.attn_kv_a_norm.weight", f"{module}.kv_a_layernorm.weight", (latent.rank,)),
        WantedTensor(
            f"{block}.attn_output.weight", f"{module}.o_proj.weight", (sizes.hidden, sizes.heads * latent.values)
        ),
        *_latent_projections(hyper, latent, sizes.heads, block, module, newer=newer),
    ]
    if latent.queries is None:
        return [*wanted, WantedTensor(f"{block}.attn_q.weight", f"{module}.q_proj.weight", (wide, sizes.hidden))]
    return [
        *wanted,
        WantedTensor(f"{block}.attn_q_a.weight", f"{module}.q_a_proj.weight", (latent.queries, sizes.hidden)),
        WantedTensor(f"{block}.attn_q_a_norm.weight", f"{module}.q_a_layernorm.weight", (latent.queries,)),
        WantedTensor(f"{block}.attn_q_b.weight", f"{module}.q_b_proj.weight", (wide, latent.queries)),
    ]


def _latent_projections(
    hyper: Hyperparameters, latent: LatentSizes, heads: int, block: str, module: str, *, newer: bool
) -> list[WantedTensor]:
    """Older files have keys and values in one matrix, newer ones in two, with that of the keys transposed; V2's
    model has one, V3's two."""
    whole, keys, values = (f"{block}.attn_{part}.weight" for part in ("kv_b", "k_b", "v_b"))
    of_keys, of_values = (heads, latent.rank, latent.plain), (heads, latent.values, latent.rank)
    if whole in hyper.file.tensors:
        shape = (heads * (latent.plain + latent.values), latent.rank)
        # Split, as V3's model wants them, they would have to be quantised anew.
        return [WantedTensor(whole, f"{module}.kv_b_proj.weight", shape, plain=newer)]
    if newer:
        return [
            WantedTensor(keys, f"{module}.embed_q.weight", of_keys),
            WantedTensor(values, f"{module}.unembed_out.weight", of_values),
        ]
    return [
        WantedTensor(
            keys,
            f"{module}.kv_b_proj.weight",
            of_keys,
            plain=True,
            further=((values, of_values),),
            join=_key_value_rows,
        )
    ]


def _key_value_rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """[heads, rank, plain] and [heads, values, rank] as the rows of one matrix, a head's keys before its values."""
    keys, values = parts
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])


def glm4_moe_blueprint(hyper: Hyperparameters) -> Blueprint:
    whole = DecoderSizes.read(hyper)
    rotated = hyper.integer("rope.dimension_count", whole.head)
    ahead = hyper.get("nextn_predict_layers", 0)  # layers behind the last, of a draft head
    if not isinstance(ahead, int) or not 0 <= ahead < whole.layers:
        raise ModelError(f"{hyper.architecture}.nextn_predict_layers is {ahead!r} of {whole.layers} layers")
    sizes = replace(whole, layers=whole.layers - ahead)
    refuse_sliding_window(hyper)
    routing, layers = _glm_layers(hyper, sizes)
    head = _glm_head(hyper, sizes) if ahead else []
    tensors, written = hyper.file.tensors, {name for item in head for name, _ in item.sources(hyper.file.tensors)}
    behind = tuple(f"blk.{layer}." for layer in range(sizes.layers, whole.layers))
    normed, biased = _glm_traits(hyper)
    return Blueprint(
        config=common_config(hyper, sizes, "glm4_moe", "Glm4MoeForCausalLM")
        | routing
        | {"head_dim": sizes.head, "partial_rotary_factor": rotated / sizes.head, "use_qk_norm": normed}
        | {"attention_bias": biased, "rope_scaling": None, "tie_word_embeddings": False},
        tensors=(*end_tensors(hyper, sizes, own_head=True), *layers, *head),
        spent=refuse_rope_scaling(hyper, rotated) | {name for name in tensors if name.startswith(behind)} - written,
    )


def _glm_traits(hyper: Hyperparameters) -> tuple[bool, bool]:
    """Whether queries and keys are normed, and whether their projections have biases."""
    return "blk.0.attn_q_norm.weight" in hyper.file.tensors, "blk.0.attn_q.bias" in hyper.file.tensors


def _glm_layers(hyper: Hyperparameters, sizes: DecoderSizes) -> tuple[dict[str, Any], list[WantedTensor]]:
    normed, biased = _glm_traits(hyper)
    routing, experts = shared_expert_moe(hyper, SIGMOID, sizes.hidden, sizes.inner, sizes.layers)
    return routing, [
        *attention_tensors(sizes, biased=("q", "k", "v") * biased),
        *experts,
        *norm_tensors(sizes.layers, POST_NORMS, sizes.hidden),
        *norm_tensors(sizes.layers, HEAD_NORMS if normed else {}, sizes.head),
    ]


def _glm_head(hyper: Hyperparameters, sizes: DecoderSizes) -> list[WantedTensor]:
    """The draft head: the first layer behind the last, with the head's own parts; nothing where the file lacks some of
    it. Its embedding and output head, if it has them, repeat the model's."""
    block, module = f"blk.{sizes.layers}.", f"model.layers.{sizes.layers}"
    _, layers = _glm_layers(hyper, replace(sizes, layers=sizes.layers + 1))
    parts = [
        WantedTensor(f"{block}nextn.eh_proj.weight", f"{module}.eh_proj.weight", (sizes.hidden, 2 * sizes.hidden)),
        *(
            WantedTensor(f"{block}nextn.{source}.weight", f"{module}.{target}.weight", (sizes.hidden,))
            for source, target in NEXTN_NORMS.items()
        ),
    ]
    wanted = [*(item for item in layers if item.source.startswith(block)), *parts]
    there = hyper.file.tensors
    return wanted if all(name in there for item in wanted for name, _ in item.sources(there)) else []
