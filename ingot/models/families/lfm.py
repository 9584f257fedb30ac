"""Liquid's LFM2, most of whose layers are short convolutions."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, ShortConvolution, Wiring

FAMILIES = (
    Family(
        "lfm2",
        attention={"Attention": Wiring(out="out_proj", norms=("q_layernorm", "k_layernorm"))},
        mlps={"MLP": MLPWiring(gate="w1", up="w3", down="w2")},
        recurrences={"ShortConv": ShortConvolution()},
    ),
    Family(
        "lfm2_moe",
        attention={"Attention": Wiring(out="out_proj", norms=("q_layernorm", "k_layernorm"))},
        mlps={"MLP": MLPWiring()},
        recurrences={"ShortConv": ShortConvolution()},
    ),
)
