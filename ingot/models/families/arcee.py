"""Arcee's Trinity."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("afmoe", mlps={"MLP": MLPWiring()}),)
