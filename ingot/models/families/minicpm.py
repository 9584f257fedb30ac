"""MiniCPM."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "minicpm",
        attention={"Attention": Wiring(heads="num_heads", kv_heads="num_key_value_heads")},
        mlps={"MLP": MLPWiring()},
    ),
    Family("minicpm3", mlps={"MLP": MLPWiring()}),
)
