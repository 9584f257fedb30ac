"""DeepSeek V2 and V3 in GGUF files: keys and values unfolded from one narrow vector a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.errors import ModelError
from ingot.models.gguf.blueprint import (
    LLAMA_NORMS,
    Blueprint,
    Sizes,
    Wanted,
    ends,
    layer_count,
    norms,
    usual_config,
    vocabulary,
)
from ingot.models.gguf.hyperparameters import Hyperparameters
from ingot.models.gguf.moe_architectures import SIGMOID, SOFTMAX, shared_mixture
from ingot.models.gguf.rope import rope_scaling


@dataclass(frozen=True, slots=True)
class Latent:
    """The widths of latent attention, of a head but for the ranks."""

    queries: int | None  # the rank that queries go through; None: they do not
    rank: int
    rotated: int
    plain: int
    values: int

    @classmethod
    def read(cls, hyper: Hyperparameters) -> Latent:
        """Files that fold the unfolding into queries say a head's own widths under names of their own."""
        rank, rotated = hyper.integer("attention.kv_lora_rank"), hyper.integer("rope.dimension_count")
        key, value = hyper.integer("attention.key_length"), hyper.integer("attention.value_length")
        key = hyper.integer("attention.key_length_mla", key)
        if key <= rotated:
            raise ModelError(f"{hyper.architecture}.rope.dimension_count is {rotated} of keys of {key}")
        asked = hyper.integer("attention.q_lora_rank") if hyper.get("attention.q_lora_rank") else None
        return cls(asked, rank, rotated, key - rotated, hyper.integer("attention.value_length_mla", value))

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


def deepseek2(hyper: Hyperparameters) -> Blueprint:
    latent = Latent.read(hyper)
    heads, inner = hyper.integer("attention.head_count"), hyper.integer("feed_forward_length")
    hyper.get("attention.head_count_kv")  # one where the unfolding is folded into queries; the heads' number counts
    sizes = Sizes(
        hyper.integer("embedding_length"), inner, layer_count(hyper), heads, heads, latent.rotated, vocabulary(hyper)
    )
    newer = hyper.get("expert_gating_func", SOFTMAX) == SIGMOID
    routing, experts = shared_mixture(hyper, SIGMOID if newer else SOFTMAX, sizes.hidden, inner, sizes.layers)
    scaling, spent = rope_scaling(hyper, latent.rotated, scales_attention=True)
    if not scaling and not newer:
        scaling = {"rope_scaling": {"type": "yarn", "factor": 1.0}}  # its model has no other way to say none
    version = 3 if newer else 2
    return Blueprint(
        config=usual_config(hyper, sizes, f"deepseek_v{version}", f"DeepseekV{version}ForCausalLM")
        | latent.config
        | routing
        | {"moe_layer_freq": 1, "tie_word_embeddings": False}
        | scaling,
        tensors=(
            *ends(hyper, sizes, own_head=True),
            *(item for layer in range(sizes.layers) for item in _attention(hyper, latent, sizes, layer, newer=newer)),
            *experts,
            *norms(sizes.layers, LLAMA_NORMS, sizes.hidden),
        ),
        spent=spent,
    )


def _attention(hyper: Hyperparameters, latent: Latent, sizes: Sizes, layer: int, *, newer: bool) -> list[Wanted]:
    block, module = f"blk.{layer}", f"model.layers.{layer}.self_attn"
    wide = sizes.heads * (latent.plain + latent.rotated)
    wanted = [
        Wanted(
            f"{block}.attn_kv_a_mqa.weight",
            f"{module}.kv_a_proj_with_mqa.weight",
            (latent.rank + latent.rotated, sizes.hidden),
        ),
        Wanted(f"{block}.attn_kv_a_norm.weight", f"{module}.kv_a_layernorm.weight", (latent.rank,)),
        Wanted(f"{block}.attn_output.weight", f"{module}.o_proj.weight", (sizes.hidden, sizes.heads * latent.values)),
        *_unfolding(hyper, latent, sizes.heads, block, module, newer=newer),
    ]
    if latent.queries is None:
        return [*wanted, Wanted(f"{block}.attn_q.weight", f"{module}.q_proj.weight", (wide, sizes.hidden))]
    return [
        *wanted,
        Wanted(f"{block}.attn_q_a.weight", f"{module}.q_a_proj.weight", (latent.queries, sizes.hidden)),
        Wanted(f"{block}.attn_q_a_norm.weight", f"{module}.q_a_layernorm.weight", (latent.queries,)),
        Wanted(f"{block}.attn_q_b.weight", f"{module}.q_b_proj.weight", (wide, latent.queries)),
    ]


def _unfolding(
    hyper: Hyperparameters, latent: Latent, heads: int, block: str, module: str, *, newer: bool
) -> list[Wanted]:
    """Older files have keys and values in one matrix, newer ones apart, with that of the keys transposed; so have the
    models: V2 one, V3 two."""
    whole, keys, values = (f"{block}.attn_{part}.weight" for part in ("kv_b", "k_b", "v_b"))
    of_keys, of_values = (heads, latent.rank, latent.plain), (heads, latent.values, latent.rank)
    if whole in hyper.file.tensors:
        shape = (heads * (latent.plain + latent.values), latent.rank)
        # Written apart, as V3's model wants them, they would have to be packed anew.
        return [Wanted(whole, f"{module}.kv_b_proj.weight", shape, plain=newer)]
    if newer:
        return [
            Wanted(keys, f"{module}.embed_q.weight", of_keys),
            Wanted(values, f"{module}.unembed_out.weight", of_values),
        ]
    return [
        Wanted(
            keys, f"{module}.kv_b_proj.weight", of_keys, plain=True, beside=((values, of_values),), join=_key_value_rows
        )
    ]


def _key_value_rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """[heads, rank, plain] and [heads, values, rank] as the rows of one matrix, a head's keys before its values."""
    keys, values = parts
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])
