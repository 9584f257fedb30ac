"""Meta's Muse."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Norm

FAMILIES = (
    Family(
        "muse_glimmer",
        mlps={"MLP": MLPWiring()},
        norms={"CenteredRMSNorm": Norm("rms", one_more=True)},
    ),
)
