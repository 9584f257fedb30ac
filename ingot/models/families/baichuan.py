"""Baichuan M1."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("baichuan_m1", mlps={"MLP": MLPWiring()}),)
