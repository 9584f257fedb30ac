"""ByteDance's Seed."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "seed_oss",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
        fused=("TransformerBlock",),
    ),
)
