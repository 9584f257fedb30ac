"""Kyutai's Helium."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "helium",
        attention={"HeliumAttention": Wiring()},
        mlps={"HeliumMLP": MLPWiring()},
        fused=("HeliumDecoderLayer",),
    ),
)
