"""Mamba 2."""

from __future__ import annotations

from ingot.models.families.description import Family, Scan

FAMILIES = (Family("mamba2", recurrences={"Mamba2Block": Scan()}),)
