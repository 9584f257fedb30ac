"""AI21's Jamba."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "jamba",
        attention={"JambaAttention": Wiring(heads="num_attention_heads", kv_heads="num_key_value_heads")},
        mlps={"JambaMLP": MLPWiring()},
    ),
)
