"""Nanbeige."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "nanbeige",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
    ),
)
