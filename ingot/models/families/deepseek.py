"""DeepSeek, whose later attention is latent and runs its own code."""

from __future__ import annotations

from ingot.models.families.description import Family, HeadWiring, MLPWiring, Wiring

FAMILIES = (
    Family(
        "deepseek",
        attention={"DeepseekAttention": Wiring(heads="num_attention_heads", kv_heads="num_kv_heads")},
        mlps={"DeepseekMLP": MLPWiring()},
    ),
    Family("deepseek_v2", mlps={"DeepseekV2MLP": MLPWiring()}),
    Family("deepseek_v3", mlps={"DeepseekV3MLP": MLPWiring()}, head=HeadWiring(array_masks=True)),
    Family("deepseek_v32", mlps={"DeepseekV32MLP": MLPWiring()}),
)
