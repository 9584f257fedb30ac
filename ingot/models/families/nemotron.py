"""NVIDIA's Nemotron."""

from __future__ import annotations

from ingot.models.families.description import Family, Norm, Scan, Wiring

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
    ),
)
