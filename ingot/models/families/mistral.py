"""Mistral's models that are not Llamas to mlx-lm."""

from __future__ import annotations

from ingot.models.families.description import Family, MLPWiring, Wiring

FAMILIES = (
    Family("mixtral", attention={"MixtralAttention": Wiring(heads="num_heads", kv_heads="num_key_value_heads")}),
    Family("ministral3", mlps={"MLP": MLPWiring()}),
)
