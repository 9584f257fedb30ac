"""iFlytek's Spark."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("spark2_5", mlps={"MLP": MLPWiring(act="gelu")}),)
