"""InternLM."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family("internlm2", mlps={"MLP": MLPWiring(gate="w1", up="w3", down="w2")}),
    Family(
        "internlm3",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
    ),
)
