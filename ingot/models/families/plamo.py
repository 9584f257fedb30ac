"""PLaMo."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (
    Family("plamo", mlps={"MLP": MLPWiring()}),
    Family("plamo2", mlps={"MLP": MLPWiring(gate="gate_up_proj", up=None)}),
    Family("plamo3", mlps={"MLP": MLPWiring(gate="gate_up_proj", up=None)}),
)
