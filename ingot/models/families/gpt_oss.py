"""gpt-oss, whose attention has sinks."""

from __future__ import annotations

from ingot.models.families.description import Family, Wiring

FAMILIES = (
    Family(
        "gpt_oss",
        attention={
            "AttentionBlock": Wiring(
                heads="num_attention_heads", kv_heads="num_key_value_heads", scale="sm_scale", sinks="sinks"
            )
        },
    ),
)
