"""TeleChat."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "telechat3",
        attention={"Telechat3Attention": Wiring(heads="num_attention_heads", kv_heads="num_key_value_heads")},
        mlps={"Telechat3MLP": MLPWiring()},
    ),
)
