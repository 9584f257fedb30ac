"""Model families of mlx-lm, N to Z, as data: the names of the parts that all decoders have.

A family is a module of mlx-lm's, described by its classes' names. What is not described runs mlx-lm's own code.
"""

from __future__ import annotations

from ingot.models.families.description import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    ModelFamily,
    MoeSpec,
    MtpSpec,
    NormSpec,
    PlamoScanSpec,
    RopeSpec,
    biased_moe,
    two_blocks,
)

_OLMO_ATTENTION = AttentionSpec(
    heads="num_attention_heads", kv_heads="num_key_value_heads", norms=("q_norm", "k_norm"), joint_head_norms=True
)

_OLMO_LAYER = two_blocks(
    before_mixer=None,
    after_mixer="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)

_QWEN_MTP = MtpSpec(
    inside="mtp.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    joint="fc",
    norm="norm",
    layers=("layers.0.",),
    copies=(),
    alone={"num_hidden_layers": 1, "full_attention_interval": 1, "decoder_sparse_step": 1, "mlp_only_layers": []},
    blind_first=False,
    offset_norms=True,
)

STEP_MTP = MtpSpec(
    copies=("embed_tokens.",),
    output="shared_head.output",
    aliases={"transformer.": ""},
    alone={"model_type": "step3p5", "num_hidden_layers": 1, "moe_layers_enum": None},
    by_layer=("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"),
    window="sliding_window",
    wants="raw",
    normed_chain=False,
    blind_first=False,
    offset_norms=True,
)
"""There are several, one for each draft token; the first is used for all."""

STEP_MOE = biased_moe(router="gate.gate", bias="gate.router_bias", groups=None, shared="share_expert", eps=1e-20)

FAMILIES = (
    # Nanbeige.
    ModelFamily("nanbeige", attention={"Attention": AttentionSpec()}, mlps={"MLP": MlpSpec()}),
    # nanochat.
    ModelFamily(
        "nanochat",
        attention={
            "Attention": AttentionSpec(
                heads="num_heads",
                kv_heads="num_kv_heads",
                out="c_proj",
                projections=("c_q", "c_k", "c_v"),
                norm_eps=1e-5,
                norms_behind_rope=True,
                rope_periods="_rope_freqs",
            )
        },
    ),
    # NVIDIA's Nemotron.
    ModelFamily(
        "nemotron",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec(act="relu2", gate=None)},
        norms={"NemotronLayerNorm1P": NormSpec("layer", one_more=True)},
        layers={"TransformerBlock": two_blocks()},
    ),
    ModelFamily("nemotron-nas", attention={"Attention": AttentionSpec()}),
    ModelFamily(
        "nemotron_h",
        attention={"NemotronHAttention": AttentionSpec(heads="num_heads", kv_heads="num_key_value_heads")},
        mlps={"NemotronHMLP": MlpSpec(act="relu2", gate=None)},
        moes={"NemotronHMoE": biased_moe(latent="moe_latent_size")},
        recurrences={"NemotronHMamba2Mixer": Mamba2Spec(norm_size="norm.group_size")},
        layers={"NemotronHBlock": LayerSpec((BlockSpec(("mixer",), "norm"),))},
        head=MtpSpec(
            inside="mtp.",
            embedding_norm="layers.0.enorm",
            hidden_norm="layers.0.hnorm",
            joint="layers.0.eh_proj",
            norm="layers.1.final_layernorm",
            layers=("layers.0.", "layers.1."),
            stored="backbone.layers.",
            copies=(),
            alone={"num_hidden_layers": 2, "hybrid_override_pattern": "*E"},
            eps="layer_norm_epsilon",
            blind_first=False,
        ),
    ),
    # Ai2's OLMo, whose norms of queries and keys span all heads.
    ModelFamily(
        "olmo2",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"), joint_head_norms=True)},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": _OLMO_LAYER},
    ),
    ModelFamily(
        "olmo3",
        attention={"Olmo3Attention": _OLMO_ATTENTION},
        mlps={"Olmo3MLP": MlpSpec()},
        layers={"Olmo3DecoderLayer": _OLMO_LAYER},
    ),
    ModelFamily(
        "olmo_hybrid",
        attention={"Attention": _OLMO_ATTENTION},
        mlps={"MLP": MlpSpec()},
        recurrences={
            "GatedDeltaNet": GatedDeltaSpec(
                qkv=("q_proj", "k_proj", "v_proj"),
                convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
                gates=(("g_proj",),),
                strength="b_proj",
                most_strength="allow_neg_eigval",
                decay=("a_proj",),
                norm="o_norm",
                out="o_proj",
            )
        },
        layers={"LinearAttentionDecoderLayer": two_blocks("linear_attn"), "FullAttentionDecoderLayer": _OLMO_LAYER},
    ),
    ModelFamily(
        "olmoe",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"), joint_head_norms=True)},
        moes={"OlmoeSparseMoeBlock": MoeSpec(normed="norm_topk_prob")},
        layers={"TransformerBlock": two_blocks()},
    ),
    # Apple's OpenELM.
    ModelFamily(
        "openelm",
        attention={"Attention": AttentionSpec(out="out_proj", joint="qkv_proj", norms=("q_norm", "k_norm"))},
        mlps={"MLP": MlpSpec(gate="proj_1", up=None, down="proj_2")},
    ),
    # Microsoft's Phi.
    ModelFamily(
        "phi",
        attention={
            "PhiAttention": AttentionSpec(
                heads="num_heads", kv_heads="num_key_value_heads", scale=None, out="dense", in_float32=True
            )
        },
    ),
    ModelFamily(
        "phi3",
        attention={"Attention": AttentionSpec(joint="qkv_proj")},
        mlps={"MLP": MlpSpec(gate="gate_up_proj", up=None)},
        layers={"TransformerBlock": two_blocks()},
    ),
    ModelFamily("phi3small", refused="mlx-lm's code for it lets the tokens of a prompt see the ones after them"),
    ModelFamily("phimoe", attention={"Attention": AttentionSpec()}),
    ModelFamily(
        "phixtral",
        attention={
            "RoPEAttention": AttentionSpec(
                heads="num_heads", kv_heads="num_heads", scale=None, out="out_proj", joint="Wqkv", in_float32=True
            )
        },
    ),
    # PLaMo.
    ModelFamily(
        "plamo",
        attention={
            "Attention": AttentionSpec(heads="q_num_heads", kv_heads="k_num_heads", rope="rotary_emb", tiled_heads=True)
        },
        mlps={"MLP": MlpSpec()},
    ),
    ModelFamily(
        "plamo2",
        attention={
            "Attention": AttentionSpec(
                heads="q_num_heads",
                kv_heads="k_num_heads",
                joint="qkv_proj",
                norm_eps=1e-6,
                norm_weights=("q_weight", "k_weight"),
            )
        },
        mlps={"MLP": MlpSpec(gate="gate_up_proj", up=None)},
        recurrences={"Mamba": PlamoScanSpec()},
    ),
    ModelFamily(
        "plamo3",
        attention={
            "Attention": AttentionSpec(
                heads="q_num_heads", kv_heads="k_num_heads", joint="qkv_proj", norms=("q_norm", "k_norm")
            )
        },
        mlps={"MLP": MlpSpec(gate="gate_up_proj", up=None)},
    ),
    # Alibaba's Qwen.
    ModelFamily(
        "qwen",
        attention={
            "Attention": AttentionSpec(
                heads="num_attention_heads",
                kv_heads="num_attention_heads",
                out="c_proj",
                joint="c_attn",
                rope="rotary_emb",
            )
        },
        mlps={"MLP": MlpSpec(gate="w2", up="w1", down="c_proj")},
    ),
    ModelFamily(
        "qwen2",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": two_blocks()},
    ),
    ModelFamily(
        "qwen2_moe",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec()},
        moes={
            "Qwen2MoeSparseMoeBlock": MoeSpec(normed=False, shared="shared_expert", shared_gate="shared_expert_gate")
        },
        layers={"Qwen2MoeDecoderLayer": two_blocks()},
    ),
    ModelFamily(
        "qwen3",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": two_blocks()},
    ),
    ModelFamily(
        "qwen3_moe",
        attention={"Attention": AttentionSpec(norms=("q_norm", "k_norm"))},
        mlps={"MLP": MlpSpec()},
        moes={"Qwen3MoeSparseMoeBlock": MoeSpec(normed="norm_topk_prob", later=True)},
        layers={"Qwen3MoeDecoderLayer": two_blocks()},
    ),
    ModelFamily(
        "qwen3_next",
        attention={
            "Qwen3NextAttention": AttentionSpec(
                heads="num_attention_heads", kv_heads="num_key_value_heads", norms=("q_norm", "k_norm"), gated=True
            )
        },
        mlps={"Qwen3NextMLP": MlpSpec()},
        moes={
            "Qwen3NextSparseMoeBlock": MoeSpec(
                normed="norm_topk_prob", later=True, shared="shared_expert", shared_gate="shared_expert_gate"
            )
        },
        recurrences={
            "Qwen3NextGatedDeltaNet": GatedDeltaSpec(
                joint=True,
                qkv=("in_proj_qkvz",),
                gates=(("in_proj_qkvz",),),
                strength="in_proj_ba",
                decay=("in_proj_ba",),
            )
        },
        layers={"Qwen3NextDecoderLayer": two_blocks(("linear_attn", "self_attn"))},
        head=_QWEN_MTP,
    ),
    ModelFamily(
        "qwen3_5",
        recurrences={"GatedDeltaNet": GatedDeltaSpec()},
        layers={"DecoderLayer": two_blocks(("linear_attn", "self_attn"))},
        text_only=("qwen3_5_text",),
        head=_QWEN_MTP,
    ),
    ModelFamily("qwen3_5_moe", text_only=("qwen3_5_moe_text",), head=_QWEN_MTP),
    # ByteDance's Seed.
    ModelFamily(
        "seed_oss",
        attention={"Attention": AttentionSpec()},
        mlps={"MLP": MlpSpec()},
        layers={"TransformerBlock": two_blocks()},
    ),
    # Hugging Face's SmolLM3: Llamas, some of whose layers rotate nothing.
    ModelFamily("smollm3", ropes={"NoPE": RopeSpec(dims=None)}),
    # iFlytek's Spark.
    ModelFamily(
        "spark2_5",
        attention={"Attention": AttentionSpec(out="out_proj", joint="q_k_v_proj", gate="g_proj")},
        mlps={"MLP": MlpSpec(act="gelu")},
        layers={"TransformerBlock": two_blocks()},
    ),
    # StableLM.
    ModelFamily(
        "stablelm",
        attention={
            "Attention": AttentionSpec(
                heads="num_heads",
                kv_heads="num_key_value_heads",
                scale=None,
                norms=("q_layernorm", "k_layernorm"),
                in_float32=True,
            )
        },
        mlps={"MLP": MlpSpec()},
    ),
    # StarCoder.
    ModelFamily("starcoder2", attention={"Attention": AttentionSpec()}),
    # StepFun's Step, whose norms hold what they multiply by, whatever their name says.
    ModelFamily(
        "step3p5",
        attention={
            "Step3p5Attention": AttentionSpec(
                heads="num_heads", kv_heads="num_kv_heads", norms=("q_norm", "k_norm"), gate="g_proj"
            )
        },
        mlps={"Step3p5MLP": MlpSpec(unless="limit")},
        moes={"Step3p5MoE": STEP_MOE},
        norms={"ZeroCenteredRMSNorm": NormSpec("rms")},
        layers={"Step3p5DecoderLayer": two_blocks()},
        head=STEP_MTP,
    ),
    # Talkie.
    ModelFamily(
        "talkie",
        attention={
            "Attention": AttentionSpec(
                kv_heads="n_heads",
                out="attn_resid",
                projections=("attn_query", "attn_key", "attn_value"),
                norm_eps="eps",
                norms_behind_rope=True,
                query_scale="head_gain.head_g",
                rope_periods="_rope_freqs",
            )
        },
        mlps={"MLP": MlpSpec(gate="mlp_gate", up="mlp_linear", down="mlp_resid")},
    ),
    # TeleChat.
    ModelFamily(
        "telechat3",
        attention={"Telechat3Attention": AttentionSpec(heads="num_attention_heads", kv_heads="num_key_value_heads")},
        mlps={"Telechat3MLP": MlpSpec()},
        layers={"Telechat3DecoderLayer": two_blocks()},
    ),
    # Tencent's Youtu.
    ModelFamily(
        "youtu_llm",
        attention={
            "YoutuLLMAttention": AttentionSpec(
                heads="num_heads", kv_heads="num_heads", latent=LatentSpec(unpacked="kv_b_proj")
            )
        },
        mlps={"YoutuLLMMLP": MlpSpec()},
    ),
)
