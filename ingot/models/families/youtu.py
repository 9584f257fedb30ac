"""Tencent's Youtu."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("youtu_llm", mlps={"YoutuLLMMLP": MLPWiring()}),)
