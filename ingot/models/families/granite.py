"""IBM's Granite."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Scan, Wiring

FAMILIES = (
    Family(
        "granite",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
    ),
    Family("granitemoe", attention={"GraniteMoeAttention": Wiring()}),
    Family(
        "granitemoehybrid",
        attention={"GraniteMoeHybridAttention": Wiring()},
        mlps={
            "GraniteMoeHybridMLP": MLPWiring(),
            "GraniteMoeHybridSharedMLP": MLPWiring(gate="input_linear", up=None, down="output_linear"),
        },
        recurrences={"GraniteMoeHybridMamba2Mixer": Scan()},
    ),
)
