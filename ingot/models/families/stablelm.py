"""StableLM."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("stablelm", mlps={"MLP": MLPWiring()}),)
