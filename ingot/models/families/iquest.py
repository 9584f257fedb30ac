"""IQuest's Loop Coder, which runs its layers twice."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring

FAMILIES = (Family("iquestloopcoder", mlps={"MLP": MLPWiring()}),)
