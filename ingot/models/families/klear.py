"""Kuaishou's Klear."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "Klear",
        attention={
            "KlearAttention": Wiring(
                heads="num_attention_heads", kv_heads="num_key_value_heads", norms=("q_norm", "k_norm")
            )
        },
        mlps={"KlearMLP": MLPWiring()},
    ),
)
