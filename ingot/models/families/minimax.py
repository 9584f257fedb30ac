"""MiniMax."""

from __future__ import annotations

from ingot.models.families.description import Family, Norm

FAMILIES = (
    Family(
        "minimax_m3_vl",
        norms={"GemmaRMSNorm": Norm("rms", one_more=True)},
        unmixed="in long prompts it chooses the blocks of keys near a token by its place in the longest row",
    ),
)
