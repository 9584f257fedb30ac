"""Families that mlx-vlm has and mlx-lm has not, as data: the language parts of its packages, and what they share."""

from __future__ import annotations

from ingot.models.families.description import (
    AttentionSpec,
    LatentSpec,
    MlpSpec,
    ModelFamily,
    NormSpec,
    biased_moe,
    two_blocks,
)
from ingot.models.families.n_to_z import STEP_MOE, STEP_MTP

FAMILIES = (
    ModelFamily(
        "cohere2_moe",
        attention={"Attention": AttentionSpec(rotates=("use_sliding_window", "force_rope"))},
    ),
    # Mistral Large 3 and Xing are DeepSeek V3's.
    ModelFamily(
        "deepseek_v3",
        attention={"DeepseekV3Attention": AttentionSpec(heads="num_heads", kv_heads=1, latent=LatentSpec())},
        moes={"DeepseekV3MoE": biased_moe()},
        layers={"DeepseekV3DecoderLayer": two_blocks()},
    ),
    # Their layers compute up to eight tokens of a row one by one, as these would be alone.
    ModelFamily("deepseek_v4", apart_in_blocks=True),
    ModelFamily("glm5_next", apart_in_blocks=True),
    # Its indexers' choice is compiled with the first length's rank of the last one chosen.
    ModelFamily("hy_v4", uncompiled=("HyV4Attention",)),
    # K2 Horizon.
    ModelFamily("k2_horizon", attention={"Attention": AttentionSpec()}, layers={"TransformerBlock": two_blocks()}),
    # Klear, whose configs may also be for mlx-lm's.
    ModelFamily(
        "klear",
        attention={
            "KlearAttention": AttentionSpec(
                heads="num_attention_heads", kv_heads="num_key_value_heads", norms=("q_norm", "k_norm")
            )
        },
        mlps={"KlearMLP": MlpSpec()},
    ),
    # What several packages have.
    ModelFamily("mlp", mlps={"DeepseekMLP": MlpSpec(), "SwiGLUMLP": MlpSpec()}),
    # MiMo V2.5 is V2 Flash with towers.
    ModelFamily(
        "mimo_v2_flash",
        attention={"Attention": AttentionSpec(value_scale="v_scale", sinks="attention_sink_bias")},
    ),
    ModelFamily(
        "step3p7",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"), gate="g_proj")},
        mlps={"MLP": MlpSpec(unless="limit")},
        moes={"MoE": STEP_MOE},
        norms={"StepRMSNorm": NormSpec("rms")},
        layers={"DecoderLayer": two_blocks()},
        head=STEP_MTP,
    ),
)
