"""Xiaomi's MiMo."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "mimo",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
        fused=("TransformerBlock",),
    ),
    Family("mimo_v2_flash", mlps={"MLP": MLPWiring()}),
)
