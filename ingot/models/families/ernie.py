"""ERNIE 4.5."""

from __future__ import annotations

from ingot.models.families.description import Family, HeadWiring, MLPWiring, Wiring

FAMILIES = (
    Family(
        "ernie4_5",
        attention={"Attention": Wiring()},
        mlps={"MLP": MLPWiring()},
        fused=("DecoderLayer",),
    ),
    Family(
        "ernie4_5_moe",
        attention={"Attention": Wiring()},
        mlps={"Ernie4_5_MLP": MLPWiring()},
        head=HeadWiring(
            inside="mtp_",
            embedding_norm="emb_norm.0",
            hidden_norm="hidden_norm.0",
            joint="linear_proj.0",
            norm=None,
            layers=("block.0.",),
            copies=(),
            alone={"num_hidden_layers": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
        ),
    ),
)
