"""Meituan's LongCat."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("longcat_flash", mlps={"LongcatFlashMLP": MLPWiring()}),)
