"""StepFun's Step, whose norms hold what they multiply by, whatever their name says."""

from __future__ import annotations

from ingot.models.families.description import Family, Norm

FAMILIES = (Family("step3p5", norms={"ZeroCenteredRMSNorm": Norm("rms")}),)
