"""Bailing, as Ling and Ring are called in their configs."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (
    Family("bailing_hybrid", mlps={"MLP": MLPWiring()}),
    Family("bailing_moe", mlps={"BailingMoeMLP": MLPWiring()}),
    Family("bailing_moe_linear", mlps={"MLP": MLPWiring()}),
    Family("bailing_moe_v3", mlps={"BailingMLP": MLPWiring()}),
)
