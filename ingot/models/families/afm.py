"""Apple's on-device models."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("afm7", mlps={"MLP": MLPWiring()}),)
