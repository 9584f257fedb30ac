"""Gemma, whose norms multiply by one more than their weights."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Norm, Wiring

FAMILIES = (
    Family(
        "gemma",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring(act="gelu")},
        norms={"RMSNorm": Norm("rms", one_more=True)},
    ),
    Family(
        "gemma2",
        attention={"Attention": Wiring(cap="attn_logit_softcapping")},
        mlps={"MLP": MLPWiring(act="gelu_tanh")},
        norms={"RMSNorm": Norm("rms", one_more=True)},
    ),
    Family(
        "gemma3_text",
        attention={"Attention": Wiring(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MLPWiring(act="gelu_tanh")},
        norms={"RMSNorm": Norm("rms", one_more=True)},
    ),
    Family("gemma4_text", mlps={"MLP": MLPWiring(act="gelu_tanh")}),
    Family(
        "recurrent_gemma",
        mlps={"MLPBlock": MLPWiring(act="gelu_tanh")},
        norms={"RMSNorm": Norm("rms", one_more=True)},
    ),
)
