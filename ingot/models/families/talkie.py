"""Talkie."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("talkie", mlps={"MLP": MLPWiring(gate="mlp_gate", up="mlp_linear", down="mlp_resid")}),)
