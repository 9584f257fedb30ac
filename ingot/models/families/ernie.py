"""ERNIE 4.5."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "ernie4_5",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
        fused=("DecoderLayer",),
    ),
    Family(
        "ernie4_5_moe",
        attention={"Attention": Wiring()},
        mlps={"Ernie4_5_MLP": MLPWiring()},
    ),
)
