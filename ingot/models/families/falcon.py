"""Falcon H1, whose layers have attention and a scan side by side."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Scan, Wiring

FAMILIES = (
    Family(
        "falcon_h1",
        attention={"FalconH1Attention": Wiring(heads="num_heads", kv_heads="num_kv_heads")},
        mlps={"FalconH1MLP": MLPWiring()},
        recurrences={
            "FalconH1Mixer": Scan(
                normed="mamba_rms_norm", eps="norm.variance_epsilon", norm_first="norm.norm_before_gate"
            )
        },
    ),
)
