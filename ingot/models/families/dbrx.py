"""DBRX."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("dbrx", mlps={"MLP": MLPWiring(gate="w1", up="v1", down="w2")}),)
