"""GLM."""

from __future__ import annotations

from ingot.models.families.description import Family, HeadWiring, MLPWiring, Wiring

FAMILIES = (
    Family(
        "glm",
        attention={"GLMAttention": Wiring(heads="num_attention_heads", kv_heads="num_key_value_heads")},
        mlps={"GLMMLP": MLPWiring(gate="gate_up_proj", up=None)},
    ),
    Family(
        "glm4",
        attention={"Glm4Attention": Wiring()},
        mlps={"Glm4MLP": MLPWiring(gate="gate_up_proj", up=None)},
    ),
    Family(
        "glm4_moe",
        attention={"Attention": Wiring(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MLPWiring()},
        head=HeadWiring(),
    ),
    Family("glm4_moe_lite", mlps={"Glm4MoeLiteMLP": MLPWiring()}, head=HeadWiring(array_masks=True)),
)
