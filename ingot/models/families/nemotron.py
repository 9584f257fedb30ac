"""NVIDIA's Nemotron."""

from __future__ import annotations

from ingot.models.families.description import Family, Norm, Scan, Wiring

FAMILIES = (
    Family(
        "nemotron",
        attention={"Attention": Wiring()},
        norms={"NemotronLayerNorm1P": Norm("layer", one_more=True)},
    ),
    Family("nemotron_h", recurrences={"NemotronHMamba2Mixer": Scan(norm_size="norm.group_size")}),
)
