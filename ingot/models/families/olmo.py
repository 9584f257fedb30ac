"""Ai2's OLMo, whose norms of queries and keys span all heads."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

_LONG = Wiring(
    heads="num_attention_heads", kv_heads="num_key_value_heads", norms=("q_norm", "k_norm"), whole_norms=True
)

FAMILIES = (
    Family(
        "olmo2",
        attention={"Attention": Wiring(norms=("q_norm", "k_norm"), whole_norms=True)},
        mlps={"MLP": MLPWiring()},
    ),
    Family(
        "olmo3",
        attention={"Olmo3Attention": _LONG},
        mlps={"Olmo3MLP": MLPWiring()},
    ),
    Family(
        "olmo_hybrid",
        attention={"Attention": _LONG},
        mlps={"MLP": MLPWiring()},
    ),
    Family("olmoe", attention={"Attention": Wiring(norms=("q_norm", "k_norm"), whole_norms=True)}),
)
