"""Apertus."""

from __future__ import annotations

from ingot.models.families.description import Family, Wiring

FAMILIES = (
    Family(
        "apertus",
        attention={
            "ApertusAttention": Wiring(
                heads="num_attention_heads", kv_heads="num_key_value_heads", norms=("q_norm", "k_norm")
            )
        },
    ),
)
