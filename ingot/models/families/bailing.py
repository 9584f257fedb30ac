"""Bailing, as Ling and Ring are called in their configs."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

_JOINT = Wiring(
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    out="dense",
    norms=("query_layernorm", "key_layernorm"),
    joint="query_key_value",
)

FAMILIES = (
    Family("bailing_hybrid", mlps={"MLP": MLPWiring()}),
    Family(
        "bailing_moe",
        attention={"BailingMoeAttention": _JOINT},
        mlps={"BailingMoeMLP": MLPWiring()},
    ),
    Family(
        "bailing_moe_linear",
        attention={"Attention": _JOINT},
        mlps={"MLP": MLPWiring()},
    ),
    Family("bailing_moe_v3", mlps={"BailingMLP": MLPWiring()}),
)
