"""Model families of mlx-lm, H to M, as data: the names of the parts that all decoders have.

A family is a module of mlx-lm's, described by its classes' names. What is not described runs mlx-lm's own code.
"""

from __future__ import annotations

from ingot.models.families.description import (
    AttentionSpec,
    DecoderSpec,
    IndexerSpec,
    LatentSpec,
    Mamba2Spec,
    MlpSpec,
    ModelFamily,
    MoeSpec,
    MtpSpec,
    NormSpec,
    PositionScaleSpec,
    RopeSpec,
    SelectiveScanSpec,
    SharedKvSpec,
    ShortConvSpec,
    kimi_delta,
    two_blocks,
)

_LFM_LAYER = two_blocks(("self_attn", "conv"), "feed_forward", before_mixer="operator_norm", before_mlp="ffn_norm")

FAMILIES = (
    # Kyutai's Helium.
    ModelFamily(
        "helium",
        attention={"HeliumAttention": AttentionSpec()},
        mlps={"HeliumMLP": MlpSpec()},
        layers={"HeliumDecoderLayer": two_blocks()},
    ),
    # Tencent's Hunyuan.
    ModelFamily(
        "hunyuan",
        attention={
            "Attention": AttentionSpec(
                norms=("query_layernorm", "key_layernorm"),
                norms_behind_rope=True,
                shared_kv=SharedKvSpec(argument="kv_states", projected=True),
            )
        },
        mlps={"MLP": MlpSpec()},
        ropes={"DynamicNTKAlphaRoPE": RopeSpec()},
    ),
    ModelFamily(
        "hunyuan_v1_dense",
        attention={"Attention": AttentionSpec(norms=("query_layernorm", "key_layernorm"), norms_behind_rope=True)},
        mlps={"MLP": MlpSpec()},
        ropes={"DynamicNTKAlphaRoPE": RopeSpec()},
        layers={"TransformerBlock": two_blocks()},
    ),
    # InternLM.
    ModelFamily(
        "internlm2",
        attention={"Attention": AttentionSpec(out="wo", joint="wqkv", joint_by_group=True)},
        mlps={"MLP": MlpSpec(gate="w1", up="w3", down="w2")},
    ),
    ModelFamily(
        "internlm3",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": two_blocks()},
    ),
    # IQuest's Loop Coder, which runs its layers twice.
    ModelFamily("iquestloopcoder", mlps={"MLP": MlpSpec()}),
    # AI21's Jamba.
    ModelFamily(
        "jamba",
        attention={"JambaAttention": AttentionSpec(heads="num_attention_heads", kv_heads="num_key_value_heads")},
        mlps={"JambaMLP": MlpSpec()},
        recurrences={"JambaMambaMixer": SelectiveScanSpec(norms=("dt_layernorm", "b_layernorm", "c_layernorm"))},
        layers={"JambaDecoderLayer": two_blocks(("self_attn", "mamba"), "feed_forward", before_mlp="pre_ff_layernorm")},
    ),
    # Moonshot's Kimi.
    ModelFamily(
        "kimi_k3",
        attention={
            "KimiK3MLAAttention": AttentionSpec(heads="num_heads", kv_heads=1, gate="g_proj", latent=LatentSpec())
        },
        recurrences={
            "KimiK3DeltaAttention": kimi_delta(
                qkv=("qkv_proj",), convolutions=("qkv_conv.conv",), decay_bound="lower_bound"
            )
        },
    ),
    ModelFamily(
        "kimi_linear",
        attention={"KimiMLAAttention": AttentionSpec(heads="num_heads", kv_heads=1, latent=LatentSpec())},
        mlps={"KimiMLP": MlpSpec()},
        moes={
            "KimiSparseMoE": MoeSpec(
                top="args.num_experts_per_token",
                scores="sigmoid",
                normed="args.moe_renormalize",
                eps=1e-20,
                bias="e_score_correction_bias",
                groups=("args.num_expert_group", "args.topk_group"),
                scale="args.routed_scaling_factor",
                shared="shared_experts",
            )
        },
        recurrences={"KimiDeltaAttention": kimi_delta()},
        layers={"KimiDecoderLayer": two_blocks()},
    ),
    # Kuaishou's Klear.
    ModelFamily(
        "Klear",
        attention={
            "KlearAttention": AttentionSpec(
                heads="num_attention_heads", kv_heads="num_key_value_heads", norms=("q_norm", "k_norm")
            )
        },
        mlps={"KlearMLP": MlpSpec()},
    ),
    # Poolside's Laguna.
    ModelFamily(
        "laguna",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"), gate="g_proj", gate_act="softplus")},
        mlps={"MLP": MlpSpec()},
        moes={
            "MoE": MoeSpec(
                top="gate.top_k",
                router="gate.proj",
                scores="gate.score_func",
                bias="gate.e_score_correction_bias",
                scale="routed_scaling_factor",
                shared="shared_expert",
            )
        },
        layers={"TransformerBlock": two_blocks()},
    ),
    # Liquid's LFM2, most of whose layers are short convolutions.
    ModelFamily(
        "lfm2",
        attention={"Attention": AttentionSpec(out="out_proj", norms=("q_layernorm", "k_layernorm"))},
        mlps={"MLP": MlpSpec(gate="w1", up="w3", down="w2")},
        recurrences={"ShortConv": ShortConvSpec()},
        layers={"Lfm2DecoderLayer": _LFM_LAYER},
    ),
    ModelFamily(
        "lfm2_moe",
        attention={"Attention": AttentionSpec(out="out_proj", norms=("q_layernorm", "k_layernorm"))},
        mlps={"MLP": MlpSpec()},
        moes={
            "Lfm2MoeSparseMoeBlock": MoeSpec(
                scores="sigmoid",
                normed="norm_topk_prob",
                eps=1e-6,
                bias="expert_bias",
                scale="routed_scaling_factor",
                later=True,
            )
        },
        recurrences={"ShortConv": ShortConvSpec()},
        layers={"Lfm2DecoderLayer": _LFM_LAYER},
    ),
    # Lille.
    ModelFamily(
        "lille-130m",
        attention={
            "Lille130mAttention": AttentionSpec(heads="n_head", out="out_proj", joint="qkv_proj", input_norm="norm")
        },
    ),
    # Llama, and the many models that are saved as one.
    ModelFamily(
        "llama",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": two_blocks()},
    ),
    ModelFamily(
        "llama4",
        attention={
            "Attention": AttentionSpec(
                norm_eps=1e-6, normed="use_qk_norm", norms_behind_rope=True, position_scale=PositionScaleSpec()
            )
        },
        mlps={"MLP": MlpSpec()},
        decoders={"LlamaModel": DecoderSpec(chunk_size="attention_chunk_size")},
    ),
    ModelFamily(
        "llama4_text",
        attention={"Attention": AttentionSpec(norm_eps="rms_norm_eps", normed="use_qk_norm")},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": two_blocks(mlp="feed_forward")},
    ),
    # Meituan's LongCat.
    ModelFamily(
        "longcat_flash",
        attention={
            "LongcatFlashMLA": AttentionSpec(
                heads="num_attention_heads",
                kv_heads=1,
                latent=LatentSpec(query_scale="mla_scale_q_lora", latent_scale="mla_scale_kv_lora"),
            )
        },
        mlps={"LongcatFlashMLP": MlpSpec()},
    ),
    # Mamba 2.
    ModelFamily(
        "mamba",
        recurrences={"MambaBlock": SelectiveScanSpec(normed="use_bcdt_rms", eps="args.mixer_rms_eps")},
    ),
    ModelFamily("mamba2", recurrences={"Mamba2Block": Mamba2Spec()}),
    # JetBrains' Mellum.
    ModelFamily(
        "mellum",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"))},
        moes={"MellumSparseMoeBlock": MoeSpec(normed="norm_topk_prob", later=True)},
        layers={"MellumDecoderLayer": two_blocks()},
    ),
    # Xiaomi's MiMo.
    ModelFamily(
        "mimo",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": two_blocks()},
        head=MtpSpec(
            inside="mtp_layers.0.",
            embedding_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            joint="input_proj",
            norm="final_layernorm",
            copies=(),
            hidden_first=True,
        ),
    ),
    ModelFamily(
        "mimo_v2_flash",
        attention={"Attention": AttentionSpec(value_scale="value_scale", sinks="attention_sink_bias")},
        mlps={"MLP": MlpSpec()},
        head=MtpSpec(
            inside="mtp.layers.0.",
            norm="final_layernorm",
            copies=(),
            aliases={"pre_mlp_layernorm.": "post_attention_layernorm."},
            alone={"num_hidden_layers": 2, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 0]},
            window="sliding_window_size",
            eps="layernorm_epsilon",
            blind_first=False,
        ),
    ),
    # MiniCPM.
    ModelFamily(
        "minicpm",
        attention={"Attention": AttentionSpec(heads="num_heads", kv_heads="num_key_value_heads")},
        mlps={"MLP": MlpSpec()},
        layers={"DecoderLayer": two_blocks(multiplier="scale_depth", depth="num_hidden_layers")},
    ),
    ModelFamily(
        "minicpm3",
        attention={
            "Attention": AttentionSpec(
                heads="num_heads",
                kv_heads="num_heads",
                scale="softmax_scale",
                latent=LatentSpec(unpacked="kv_b_proj"),
            )
        },
        mlps={"MLP": MlpSpec()},
    ),
    # MiniMax.
    ModelFamily(
        "minimax",
        attention={
            "MiniMaxAttention": AttentionSpec(
                heads="num_attention_heads",
                kv_heads="num_key_value_heads",
                norms=("q_norm", "k_norm"),
                joint_head_norms=True,
            )
        },
        moes={
            "MiniMaxSparseMoeBlock": MoeSpec(
                top="num_experts_per_tok", scores="sigmoid", eps=1e-20, bias="e_score_correction_bias"
            )
        },
        layers={"MiniMaxDecoderLayer": two_blocks(mlp="block_sparse_moe")},
    ),
    ModelFamily(
        "minimax_m3_vl",
        attention={
            "Attention": AttentionSpec(
                heads="num_attention_heads",
                kv_heads="num_key_value_heads",
                norms=("q_norm", "k_norm"),
                indexer=IndexerSpec(
                    module=None,
                    used="is_sparse_attn",
                    heads="index_n_heads",
                    top="index_topk_blocks",
                    queries="index_q_proj",
                    query_norm="index_q_norm",
                    keys="index_k_proj",
                    key_norm="index_k_norm",
                    rope="index_rope",
                    weights=None,
                    block="index_block_size",
                    local="index_local_blocks",
                ),
            )
        },
        norms={"GemmaRMSNorm": NormSpec("rms", one_more=True)},
        unmixed="in long prompts it chooses the blocks of keys near a token by its place in the longest row",
    ),
    # Mistral's models that are not Llamas to mlx-lm.
    ModelFamily(
        "mixtral",
        attention={"MixtralAttention": AttentionSpec(heads="num_heads", kv_heads="num_key_value_heads")},
        moes={"MixtralSparseMoeBlock": MoeSpec(top="num_experts_per_tok", scores="logits")},
        layers={"MixtralDecoderLayer": two_blocks(mlp="block_sparse_moe")},
    ),
    ModelFamily(
        "ministral3",
        attention={"Attention": AttentionSpec(token_scale="attn_scale")},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": two_blocks()},
    ),
    ModelFamily(
        "mistral4",
        attention={
            "Mistral4Attention": AttentionSpec(
                heads="num_heads", kv_heads=1, token_scale="attn_scale", latent=LatentSpec()
            )
        },
        moes={
            "Mistral4MoE": MoeSpec(
                top="num_experts_per_tok",
                normed="args.norm_topk_prob",
                eps=1e-20,
                groups=("args.n_group", "args.topk_group"),
                scale="args.routed_scaling_factor",
                shared="shared_experts",
            )
        },
        layers={"Mistral4DecoderLayer": two_blocks()},
    ),
    # Meta's Muse.
    ModelFamily(
        "muse_glimmer",
        attention={"Attention": AttentionSpec(norm_eps="eps", query_scale="qk_scale_factor", gate="gate_proj")},
        mlps={"MLP": MlpSpec()},
        norms={"CenteredRMSNorm": NormSpec("rms", one_more=True)},
        layers={
            "DecoderLayer": two_blocks(
                after_mixer="post_attention_layernorm",
                before_mlp="pre_feedforward_layernorm",
                after_mlp="post_feedforward_layernorm",
            )
        },
    ),
    ModelFamily("muse_spark", expert_gates={"PreciseSwiGLU": "silu"}),
)
