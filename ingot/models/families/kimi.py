"""Moonshot's Kimi."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("kimi_linear", mlps={"KimiMLP": MLPWiring()}),)
