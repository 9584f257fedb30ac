"""StarCoder."""

from __future__ import annotations

from ingot.models.families.description import Family, Wiring

FAMILIES = (Family("starcoder2", attention={"Attention": Wiring()}),)
