"""Poolside's Laguna."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("laguna", mlps={"MLP": MLPWiring()}),)
