"""NVIDIA's Nemotron."""

from __future__ import annotations

from ingot.models.families.description import Family, HeadWiring, Norm, Scan, Wiring

FAMILIES = (
    Family(
        "nemotron",
        attention={"Attention": Wiring()},
        norms={"NemotronLayerNorm1P": Norm("layer", one_more=True)},
    ),
    Family("nemotron-nas", attention={"Attention": Wiring()}),
    Family(
        "nemotron_h",
        attention={"NemotronHAttention": Wiring(heads="num_heads", kv_heads="num_key_value_heads")},
        recurrences={"NemotronHMamba2Mixer": Scan(norm_size="norm.group_size")},
        head=HeadWiring(
            inside="mtp.",
            embedding_norm="layers.0.enorm",
            hidden_norm="layers.0.hnorm",
            joint="layers.0.eh_proj",
            norm="layers.1.final_layernorm",
            layers=("layers.0.", "layers.1."),
            stored="backbone.layers.",
            copies=(),
            alone={"num_hidden_layers": 2, "hybrid_override_pattern": "*E"},
            eps="layer_norm_epsilon",
            blind_first=False,
        ),
    ),
)
