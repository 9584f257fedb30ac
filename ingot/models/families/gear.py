"""GEAR."""

from __future__ import annotations

from ingot.models.families.description import Family, Norm

FAMILIES = (Family("gear", norms={"GearRMSNorm": Norm("rms", one_more=True)}),)
