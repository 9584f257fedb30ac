"""Apple's OpenELM."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("openelm", mlps={"MLP": MLPWiring(gate="proj_1", up=None, down="proj_2")}),)
