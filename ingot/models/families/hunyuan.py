"""Tencent's Hunyuan."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (
    Family("hunyuan", mlps={"MLP": MLPWiring()}),
    Family("hunyuan_v1_dense", mlps={"MLP": MLPWiring()}),
)
