"""Alibaba's Qwen."""

from __future__ import annotations

from ingot.models.families.description import Family, GatedDelta, MLPWiring, Wiring

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
    ),
    Family(
        "qwen3_5",
        recurrences={"GatedDeltaNet": GatedDelta()},
        text_only=("qwen3_5_text",),
    ),
)
