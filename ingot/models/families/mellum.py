"""JetBrains' Mellum."""

from __future__ import annotations

from ingot.models.families.description import Family, Wiring

FAMILIES = (Family("mellum", attention={"Attention": Wiring(norms=("q_norm", "k_norm"))}),)
