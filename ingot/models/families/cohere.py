"""Cohere's Command models."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Norm, Wiring

FAMILIES = (
    Family(
        "cohere",
        attention={"Attention": Wiring(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MLPWiring()},
        norms={"LayerNorm2D": Norm("layer", of_heads=True)},
    ),
    Family(
        "cohere2",
        attention={"Attention": Wiring(rotates="use_sliding_window")},
        mlps={"MLP": MLPWiring()},
    ),
)
