"""Model families of mlx-lm, A to G, as data: the names of the parts that all decoders have.

A family is a module of mlx-lm's, described by its classes' names. What is not described runs mlx-lm's own code.
"""

from __future__ import annotations

from ingot.models.families.description import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    DecoderSpec,
    GatedConvSpec,
    IndexerSpec,
    LatentSpec,
    LayerInputSpec,
    LayerMoeSpec,
    LayerSpec,
    LightningSpec,
    LinearUnitSpec,
    Mamba2Spec,
    MlpSpec,
    ModelFamily,
    MoeSpec,
    MtpSpec,
    NormSpec,
    SharedKvSpec,
    biased_moe,
    kimi_delta,
    two_blocks,
)

_LATENT_ATTENTION = AttentionSpec(heads="num_heads", kv_heads=1, latent=LatentSpec())

# Heads of models with indexers attend to all tokens: what they propose is verified in any case.
_SPARSE_MTP = MtpSpec(
    copies=("embed_tokens.", "shared_head.head.", "self_attn.indexer."),
    alone={"model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1},
    array_masks=True,
)

_BAILING_ATTENTION = AttentionSpec(
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    out="dense",
    norms=("query_layernorm", "key_layernorm"),
    joint="query_key_value",
)

# The experts of Gemma 4 26B-A4B, beside the MLP.
_GEMMA4_MIXTURE = BlockSpec(
    (),
    norm_after="post_feedforward_layernorm",
    branches=(
        BranchSpec("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm_1"),
        BranchSpec(LayerMoeSpec(), norm_after="post_feedforward_layernorm_2"),
    ),
)

_PARALLEL_LAYER = LayerSpec((BlockSpec((), "input_layernorm", branches=(BranchSpec("self_attn"), BranchSpec("mlp"))),))

_GRANITE_MOE = MoeSpec(top="router.top_k", router="router.layer", scores="logits", later=True)

FAMILIES = (
    # Apple's on-device models.
    ModelFamily("afm7", mlps={"MLP": MlpSpec()}),
    # Apertus.
    ModelFamily(
        "apertus",
        attention={
            "ApertusAttention": AttentionSpec(
                heads="num_attention_heads", kv_heads="num_key_value_heads", norms=("q_norm", "k_norm")
            )
        },
    ),
    # Arcee's Trinity.
    ModelFamily(
        "afmoe",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"), gate="gate_proj")},
        mlps={"MLP": MlpSpec()},
        moes={
            "AfmoeMoE": MoeSpec(
                top="num_experts_per_tok",
                router="router.gate",
                experts="experts",
                scores="score_func",
                normed="route_norm",
                bias="expert_bias",
                groups=("n_group", "topk_group"),
                scale="route_scale",
                shared="shared_experts",
            )
        },
        layers={
            "DecoderLayer": two_blocks(
                after_mixer="post_attention_layernorm", before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm"
            )
        },
    ),
    # Baichuan M1.
    ModelFamily(
        "baichuan_m1",
        attention={
            "Attention": AttentionSpec(
                heads="num_heads", kv_heads="num_kv_heads", joint="W_pack", conv=("conv_k", "conv_v")
            )
        },
        mlps={"MLP": MlpSpec()},
        layers={"DecoderLayer": two_blocks()},
    ),
    # Bailing, as Ling and Ring are called in their configs.
    ModelFamily(
        "bailing_hybrid",
        attention={
            "MultiLatentAttention": AttentionSpec(heads="num_heads", kv_heads=1, out="dense", latent=LatentSpec())
        },
        mlps={"MLP": MlpSpec()},
        recurrences={"LinearAttention": LightningSpec()},
    ),
    ModelFamily(
        "bailing_moe",
        attention={"BailingMoeAttention": _BAILING_ATTENTION},
        mlps={"BailingMoeMLP": MlpSpec()},
        moes={
            "BailingMoeSparseMoeBlock": biased_moe(
                router="gate.gate_proj", scores="gate.score_function", bias="gate.expert_bias", eps=1e-20
            )
        },
        layers={"BailingMoeDecoderLayer": two_blocks("attention")},
    ),
    ModelFamily(
        "bailing_moe_linear",
        attention={"Attention": _BAILING_ATTENTION},
        mlps={"MLP": MlpSpec()},
        recurrences={"LinearAttention": LightningSpec()},
    ),
    ModelFamily(
        "bailing_moe_v3",
        attention={
            "BailingMLA": AttentionSpec(heads="num_heads", kv_heads=1, out="dense", gate="g_proj", latent=LatentSpec())
        },
        mlps={"BailingMLP": MlpSpec()},
        recurrences={
            "BailingKDA": kimi_delta(
                convolutions=("q_conv1d", "k_conv1d", "v_conv1d"), decay=("f_proj",), decay_bound="lower_bound"
            )
        },
        moes={"BailingSparseMoE": biased_moe(bias="gate.expert_bias", normed=True, eps=1e-20)},
        layers={"BailingDecoderLayer": two_blocks("attention")},
    ),
    # BitNet, whose weights are -1, 0 and 1.
    ModelFamily("bitnet", attention={"Attention": AttentionSpec(output_norm="attn_sub_norm")}),
    # Cohere's Command models.
    ModelFamily(
        "cohere",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MlpSpec()},
        norms={"LayerNorm2D": NormSpec("layer", of_heads=True)},
        layers={"TransformerBlock": _PARALLEL_LAYER},
    ),
    ModelFamily(
        "cohere2",
        attention={"Attention": AttentionSpec(rotates="use_sliding_window")},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": _PARALLEL_LAYER},
    ),
    # DBRX.
    ModelFamily(
        "dbrx",
        attention={
            "Attention": AttentionSpec(
                heads="num_heads", kv_heads="num_key_value_heads", out="out_proj", joint="Wqkv", clip="clip_qkv"
            )
        },
        mlps={"MLP": MlpSpec(gate="w1", up="v1", down="w2")},
    ),
    # DeepSeek, whose later attention is latent, and then has an indexer.
    ModelFamily(
        "deepseek",
        attention={"DeepseekAttention": AttentionSpec(heads="num_attention_heads", kv_heads="num_kv_heads")},
        mlps={"DeepseekMLP": MlpSpec()},
        moes={"DeepseekMoE": MoeSpec(top="gate.top_k", normed=False, shared="shared_experts")},
        layers={"DeepseekDecoderLayer": two_blocks()},
    ),
    ModelFamily(
        "deepseek_v2",
        attention={
            "DeepseekV2Attention": AttentionSpec(
                heads="num_heads", kv_heads="num_heads", latent=LatentSpec(unpacked="kv_b_proj")
            )
        },
        mlps={"DeepseekV2MLP": MlpSpec()},
    ),
    ModelFamily(
        "deepseek_v3",
        attention={"DeepseekV3Attention": _LATENT_ATTENTION},
        mlps={"DeepseekV3MLP": MlpSpec()},
        moes={"DeepseekV3MoE": biased_moe()},
        layers={"DeepseekV3DecoderLayer": two_blocks()},
        head=MtpSpec(array_masks=True),
    ),
    ModelFamily(
        "deepseek_v32",
        attention={
            "DeepseekV32Attention": AttentionSpec(
                heads="num_heads", kv_heads=1, indexer=IndexerSpec(), latent=LatentSpec()
            )
        },
        mlps={"DeepseekV32MLP": MlpSpec()},
        moes={"DeepseekV32MoE": biased_moe()},
        layers={"DeepseekV32DecoderLayer": two_blocks()},
        head=_SPARSE_MTP,
    ),
    # DeepSeek V4.1.
    ModelFamily("deepseek_v41", decoders={"TextModel": DecoderSpec(row_arguments=("window_idx",))}),
    # dots.llm1.
    ModelFamily(
        "dots1",
        attention={"Dots1Attention": AttentionSpec(norms=("q_norm", "k_norm"))},
        mlps={"Dots1MLP": MlpSpec()},
        moes={"Dots1MoE": biased_moe(experts="experts")},
        layers={"Dots1DecoderLayer": two_blocks()},
    ),
    # ERNIE 4.5.
    ModelFamily(
        "ernie4_5",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec()},
        layers={"DecoderLayer": two_blocks()},
    ),
    ModelFamily(
        "ernie4_5_moe",
        attention={"Attention": AttentionSpec()},
        mlps={"Ernie4_5_MLP": MlpSpec()},
        moes={"Ernie4_5_MoeMLP": MoeSpec(top="k", shared="shared_experts")},
        layers={"Ernie4_5_DecoderLayer": two_blocks()},
        head=MtpSpec(
            inside="mtp_",
            embedding_norm="emb_norm.0",
            hidden_norm="hidden_norm.0",
            joint="linear_proj.0",
            norm=None,
            layers=("block.0.",),
            copies=(),
            alone={"num_hidden_layers": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
        ),
    ),
    # EXAONE.
    ModelFamily(
        "exaone",
        attention={"AttentionModule": AttentionSpec(out="out_proj")},
        mlps={"MLP": MlpSpec(gate="c_fc_0", up="c_fc_1", down="c_proj")},
    ),
    ModelFamily(
        "exaone4",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"), rotates="use_rope")},
        mlps={"MLP": MlpSpec()},
        layers={
            "TransformerBlock": two_blocks(
                before_mixer=None,
                after_mixer="post_attention_layernorm",
                before_mlp=None,
                after_mlp="post_feedforward_layernorm",
            )
        },
    ),
    ModelFamily(
        "exaone_moe",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"), rotates="use_rope")},
        mlps={"MLP": MlpSpec()},
        moes={"MoE": biased_moe(eps=1e-20)},
        layers={"DecoderLayer": two_blocks()},
    ),
    # Falcon H1, whose layers have attention and a scan side by side.
    ModelFamily(
        "falcon_h1",
        attention={"FalconH1Attention": AttentionSpec(heads="num_heads", kv_heads="num_kv_heads")},
        mlps={"FalconH1MLP": MlpSpec()},
        recurrences={
            "FalconH1Mixer": Mamba2Spec(
                normed="mamba_rms_norm", eps="norm.variance_epsilon", norm_first="norm.norm_before_gate"
            )
        },
    ),
    # GEAR.
    ModelFamily(
        "gear",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"), cap="attn_logit_softcapping")},
        norms={"GearRMSNorm": NormSpec("rms", one_more=True)},
        recurrences={"ConvKVGatedMixer": GatedConvSpec()},
    ),
    # Gemma, whose norms multiply by one more than their weights.
    ModelFamily(
        "gemma",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec(act="gelu")},
        norms={"RMSNorm": NormSpec("rms", one_more=True)},
        layers={"TransformerBlock": two_blocks()},
    ),
    ModelFamily(
        "gemma2",
        attention={"Attention": AttentionSpec(cap="attn_logit_softcapping")},
        mlps={"MLP": MlpSpec(act="gelu_tanh")},
        norms={"RMSNorm": NormSpec("rms", one_more=True)},
        layers={
            "TransformerBlock": two_blocks(
                after_mixer="post_attention_layernorm",
                before_mlp="pre_feedforward_layernorm",
                after_mlp="post_feedforward_layernorm",
            )
        },
    ),
    ModelFamily(
        "gemma3_text",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MlpSpec(act="gelu_tanh")},
        norms={"RMSNorm": NormSpec("rms", one_more=True)},
        layers={
            "TransformerBlock": two_blocks(
                after_mixer="post_attention_layernorm",
                before_mlp="pre_feedforward_layernorm",
                after_mlp="post_feedforward_layernorm",
                clipped=True,
            )
        },
    ),
    ModelFamily(
        "gemma3n",
        attention={
            "Gemma3nAttention": AttentionSpec(
                norms=("q_norm", "k_norm"), value_norm="v_norm", shared_kv=SharedKvSpec(reads="is_kv_shared_layer")
            )
        },
    ),
    ModelFamily(
        "gemma4_text",
        attention={
            "Attention": AttentionSpec(
                norms=("q_norm", "k_norm"),
                value_norm="v_norm",
                shared_kv=SharedKvSpec(argument="shared_kv", returned=("offset",)),
                mutual_in_windows=True,
            )
        },
        mlps={"MLP": MlpSpec(act="gelu_tanh")},
        expert_gates={"GeGLU": "gelu_tanh"},
        layers={
            "DecoderLayer": two_blocks(
                after_mixer="post_attention_layernorm",
                before_mlp="pre_feedforward_layernorm",
                after_mlp="post_feedforward_layernorm",
                layer_input=LayerInputSpec(),
                other=("enable_moe", _GEMMA4_MIXTURE),
                scale="layer_scalar",
            )
        },
    ),
    ModelFamily(
        "recurrent_gemma",
        attention={"LocalAttentionBlock": AttentionSpec(heads="num_heads", kv_heads=1)},
        mlps={"MLPBlock": MlpSpec(act="gelu_tanh")},
        recurrences={"RecurrentBlock": LinearUnitSpec()},
        norms={"RMSNorm": NormSpec("rms", one_more=True)},
    ),
    # GLM.
    ModelFamily(
        "glm",
        attention={"GLMAttention": AttentionSpec(heads="num_attention_heads", kv_heads="num_key_value_heads")},
        mlps={"GLMMLP": MlpSpec(gate="gate_up_proj", up=None)},
        layers={"GLMBlock": two_blocks()},
    ),
    ModelFamily(
        "glm4",
        attention={"Glm4Attention": AttentionSpec()},
        mlps={"Glm4MLP": MlpSpec(gate="gate_up_proj", up=None)},
        layers={"Glm4DecoderLayer": two_blocks(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")},
    ),
    ModelFamily(
        "glm4_moe",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MlpSpec()},
        moes={"MoE": biased_moe()},
        layers={"DecoderLayer": two_blocks()},
        head=MtpSpec(),
    ),
    ModelFamily(
        "glm4_moe_lite",
        attention={"Glm4MoeLiteAttention": _LATENT_ATTENTION},
        mlps={"Glm4MoeLiteMLP": MlpSpec()},
        moes={"Glm4MoeLiteMoE": biased_moe()},
        layers={"Glm4MoeLiteDecoderLayer": two_blocks()},
        head=MtpSpec(array_masks=True),
    ),
    # GLM 5, whose classes are DeepSeek V3.2's.
    ModelFamily("glm_moe_dsa", head=_SPARSE_MTP),
    # GPT-2 and its kin, whose positions are embedded, GPT-J and GPT-NeoX.
    ModelFamily(
        "gpt2",
        attention={"Attention": AttentionSpec(heads="n_head", kv_heads="n_head", out="c_proj", joint="c_attn")},
        decoders={"GPT2Model": DecoderSpec(embedding="wte", positions="wpe", layers="h", norm="ln_f")},
    ),
    ModelFamily(
        "gpt_bigcode",
        attention={"Attention": AttentionSpec(out="c_proj", joint="c_attn")},
        decoders={"GPTBigCodeModel": DecoderSpec(embedding="wte", positions="wpe", layers="h", norm="ln_f")},
    ),
    ModelFamily(
        "gptj",
        attention={
            "GPTJAttention": AttentionSpec(
                heads="num_attention_heads", kv_heads="num_attention_heads", scale="scale_attn", out="out_proj"
            )
        },
    ),
    ModelFamily(
        "gpt_neox",
        attention={
            "Attention": AttentionSpec(
                heads="num_attention_heads",
                kv_heads="num_attention_heads",
                out="dense",
                joint="query_key_value",
                joint_by_group=True,
            )
        },
    ),
    # gpt-oss, whose attention has sinks.
    ModelFamily(
        "gpt_oss",
        attention={
            "AttentionBlock": AttentionSpec(
                heads="num_attention_heads", kv_heads="num_key_value_heads", scale="sm_scale", sinks="sinks"
            )
        },
        moes={
            "MLPBlock": MoeSpec(
                top="num_experts_per_tok", router="router", experts="experts", scores="logits", later=True
            )
        },
        layers={"TransformerBlock": two_blocks()},
    ),
    # IBM's Granite.
    ModelFamily(
        "granite",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": two_blocks(multiplier="residual_multiplier")},
    ),
    ModelFamily(
        "granitemoe",
        attention={"GraniteMoeAttention": AttentionSpec()},
        moes={"GraniteMoeMoE": _GRANITE_MOE},
        layers={"GraniteMoeDecoderLayer": two_blocks(mlp="block_sparse_moe", multiplier="residual_multiplier")},
    ),
    ModelFamily(
        "granitemoehybrid",
        attention={"GraniteMoeHybridAttention": AttentionSpec()},
        mlps={
            "GraniteMoeHybridMLP": MlpSpec(),
            "GraniteMoeHybridSharedMLP": MlpSpec(gate="input_linear", up=None, down="output_linear"),
        },
        moes={"GraniteMoeHybridMoE": _GRANITE_MOE},
        recurrences={"GraniteMoeHybridMamba2Mixer": Mamba2Spec()},
        layers={
            "GraniteMoeHybridLayer": two_blocks(
                ("self_attn", "mamba"),
                multiplier="residual_multiplier",
                other=(
                    "use_moe",
                    BlockSpec(
                        (),
                        "post_attention_layernorm",
                        branches=(BranchSpec("block_sparse_moe"), BranchSpec("shared_mlp")),
                    ),
                ),
            )
        },
    ),
)
