"""AI21's Jamba."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("jamba", mlps={"JambaMLP": MLPWiring()}),)
