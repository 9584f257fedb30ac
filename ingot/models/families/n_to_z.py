"""Alibaba's Qwen."""

from __future__ import annotations

from ingot.models.families.description import Family, GatedDelta, HeadWiring, MLPWiring, Wiring

_HEAD = HeadWiring(
    inside="mtp.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    joint="fc",
    norm="norm",
    layers=("layers.0.",),
    copies=(),
    alone={"num_hidden_layers": 1, "full_attention_interval": 1, "decoder_sparse_step": 1, "mlp_only_layers": []},
    blind_first=False,
    offset_norms=True,
)

FAMILIES = (
    Family("qwen", mlps={"MLP": MLPWiring(gate="w2", up="w1", down="c_proj")}),
    Family(
        "qwen2",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
        fused=("TransformerBlock",),
    ),
    Family(
        "qwen2_moe",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
    ),
    Family(
        "qwen3",
        attention={"Attention": Wiring(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MLPWiring()},
        fused=("TransformerBlock",),
    ),
    Family(
        "qwen3_moe",
        attention={"Attention": Wiring(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MLPWiring()},
    ),
    Family(
        "qwen3_next",
        attention={
            "Qwen3NextAttention": Wiring(
                heads="num_attention_heads", kv_heads="num_key_value_heads", norms=("q_norm", "k_norm"), gated=True
            )
        },
        mlps={"Qwen3NextMLP": MLPWiring()},
        recurrences={"Qwen3NextGatedDeltaNet": GatedDelta(joint=True)},
        head=_HEAD,
    ),
    Family(
        "qwen3_5",
        recurrences={"GatedDeltaNet": GatedDelta()},
        text_only=("qwen3_5_text",),
        head=_HEAD,
    ),
    Family("qwen3_5_moe", text_only=("qwen3_5_moe_text",), head=_HEAD),
)
