"""Falcon H1, whose layers have attention and a scan side by side."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Scan

FAMILIES = (
    Family(
        "falcon_h1",
        mlps={"FalconH1MLP": MLPWiring()},
        recurrences={
            "FalconH1Mixer": Scan(
                normed="mamba_rms_norm", eps="norm.variance_epsilon", norm_first="norm.norm_before_gate"
            )
        },
    ),
)
