"""Xiaomi's MiMo."""

from __future__ import annotations

from ingot.models.families.description import Family, HeadWiring, MLPWiring, Wiring

FAMILIES = (
    Family(
        "mimo",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
        fused=("TransformerBlock",),
        head=HeadWiring(
            inside="mtp_layers.0.",
            embedding_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            joint="input_proj",
            norm="final_layernorm",
            copies=(),
            hidden_first=True,
        ),
    ),
    Family("mimo_v2_flash", mlps={"MLP": MLPWiring()}),
)
