"""EXAONE."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family(
        "exaone",
        attention={"AttentionModule": Wiring(out="out_proj")},
        mlps={"MLP": MLPWiring(gate="c_fc_0", up="c_fc_1", down="c_proj")},
    ),
    Family(
        "exaone4",
        attention={"Attention": Wiring(norms=("q_norm", "k_norm"), rotates="use_rope")},
        mlps={"MLP": MLPWiring()},
    ),
    Family(
        "exaone_moe",
        attention={"Attention": Wiring(norms=("q_norm", "k_norm"), rotates="use_rope")},
        mlps={"MLP": MLPWiring()},
    ),
)
