"""dots.llm1."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "dots1",
        attention={"Dots1Attention": Wiring(norms=("q_norm", "k_norm"))},
        mlps={"Dots1MLP": MLPWiring()},
    ),
)
