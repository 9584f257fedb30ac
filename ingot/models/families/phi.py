"""Microsoft's Phi."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "phi3",
        attention={"Attention": Wiring(joint="qkv_proj")},
        mlps={"MLP": MLPWiring(gate="gate_up_proj", up=None)},
    ),
    Family("phi3small", refused="mlx-lm's code for it lets the tokens of a prompt see the ones after them"),
    Family("phimoe", attention={"Attention": Wiring()}),
)
