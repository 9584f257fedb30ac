"""Llama, and the many models that are saved as one."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "llama",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
        fused=("TransformerBlock",),
    ),
    Family("llama4", mlps={"MLP": MLPWiring()}),
    Family("llama4_text", mlps={"MLP": MLPWiring()}),
)
