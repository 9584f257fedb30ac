"""MiniMax."""

from __future__ import annotations

from ingot.models.families.description import Family, Norm, Wiring

FAMILIES = (
    Family(
        "minimax",
        attention={
            "MiniMaxAttention": Wiring(
                heads="num_attention_heads",
                kv_heads="num_key_value_heads",
                norms=("q_norm", "k_norm"),
                whole_norms=True,
            )
        },
    ),
    Family(
        "minimax_m3_vl",
        norms={"GemmaRMSNorm": Norm("rms", one_more=True)},
        unmixed="in long prompts it chooses the blocks of keys near a token by its place in the longest row",
    ),
)
