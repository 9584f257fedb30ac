"""What each GGUF architecture is: which of mlx-lm's models, and where files differ from what all of them have.

A new architecture is an entry of ARCHITECTURES. A hyper-parameter that is not read is refused by name: it would change
what the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import ModelError, nearest_name
from ingot.models.gguf import config as settings
from ingot.models.gguf import descriptions as describe
from ingot.models.gguf.blueprint import ROPE_FREQS, Blueprint, WantedTensor
from ingot.models.gguf.descriptions import SIGMOID, SOFTMAX
from ingot.models.gguf.file import GGUFModel, Hyperparameters
from ingot.models.gguf.tensors import (
    INTERLEAVED,
    PLUS_ONE,
    Rule,
    build_skeleton,
    in_other_layer,
    one_behind_another,
    stored_as,
    wanted_tensors,
)

Growth = Callable[[float], dict[str, Any]]
Describe = Callable[[Hyperparameters, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of mlx-lm's models, and how its files differ from those of others."""

    model_type: str
    class_name: str
    config: Mapping[str, Any] = field(default_factory=dict)  # besides what files state, which comes first
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values of settings that the model is made for
    describe: Describe | None = None
    rules: Mapping[str, Rule] = field(default_factory=dict)
    theta: float = 10_000.0  # the base of rotation, if files do not state it
    scales_rope: bool = True
    growth: Growth | None = None  # of attention scores with the scale of positions, as configs state it
    inside: bool = False  # the config is inside of another one, of images too
    spent: tuple[str, ...] = ()  # tensors that `describe` reads
    head: str = ""  # what the parts of its draft head are called in a folder; else files' heads are left out


def read_blueprint(file: GGUFModel) -> Blueprint:
    """The model that a file describes. Raises ModelError for one that cannot be run as it is described."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(_unknown_architecture(name))
    hyper = Hyperparameters(file, name)
    found = ARCHITECTURES[name]
    architecture = found if isinstance(found, Architecture) else found(hyper)
    config, spent = _read_config(architecture, hyper)
    hyper.refuse_unread()
    flat = config.get("text_config", config)
    model = build_skeleton(config)
    tensors = wanted_tensors(file, name, flat, model, architecture.rules)
    behind = tuple(f"blk.{layer}." for layer in range(flat["num_hidden_layers"], hyper.integer("block_count")))
    head = _head_tensors(architecture, file, tensors, behind) if behind else []
    written = {source for item in head for source, _ in item.sources(file.tensors)}
    left = {each for each in file.tensors if behind and each.startswith(behind)} - written
    return Blueprint(config, (*tensors, *head), spent | left)


def _unknown_architecture(architecture: Any) -> str:
    known = ", ".join(ARCHITECTURES)
    near = nearest_name(str(architecture), ARCHITECTURES)
    hint = f" (nearest: {near})" if near else ""
    return f"GGUF files of the architecture {architecture!r} are not supported{hint}; supported are: {known}"


def _read_config(architecture: Architecture, hyper: Hyperparameters) -> tuple[dict[str, Any], frozenset[str]]:
    """The config, and the tensors that it was read from."""
    hyper.refuse_unless("attention.causal", True)
    for key, values in architecture.fixed.items():
        hyper.refuse_unless(key, *values)
    names = settings.argument_names(architecture.model_type)
    config: dict[str, Any] = {"model_type": architecture.model_type, "architectures": [architecture.class_name]}
    config |= settings.read_sizes(hyper)
    config |= {key: value for key, value in architecture.config.items() if key == "tie_word_embeddings"}
    if architecture.describe is not None:
        config |= architecture.describe(hyper, config)
    if "num_attention_heads" not in config:
        config |= settings.read_heads(hyper, config["hidden_size"], names)
    spent = frozenset(architecture.spent)
    if "rope_theta" not in config:
        rope, more = settings.read_rope(
            *(hyper, config["head_dim"], names),
            theta=architecture.theta,
            scales=architecture.scales_rope,
            growth=architecture.growth,
        )
        config, spent = config | rope, spent | more
    if not hyper.was_read("attention.sliding_window") and "layer_types" not in config:
        settings.refuse_sliding_window(hyper)
    stated = settings.read_biases(hyper, names) | settings.read_named(hyper, names, config)
    config = {**architecture.config, **stated, **config}
    if "rope_parameters" in config:
        moved = ("llama_4_scaling_beta", "original_max_position_embeddings")
        config["rope_parameters"] |= {key: config[key] for key in moved if key in config}
    if architecture.inside:
        outer = {key: config[key] for key in ("model_type", "architectures", *OUTSIDE)}
        config = outer | {"text_config": config | {"model_type": f"{architecture.model_type}_text"}}
    return config, spent


def _head_tensors(
    architecture: Architecture, file: GGUFModel, tensors: list[WantedTensor], behind: tuple[str, ...]
) -> list[WantedTensor]:
    """The draft head: the first layer behind the last, which is like one with attention, with the head's own parts;
    nothing where the file lacks some of it. Its embedding and output head, if it has them, repeat the model's."""
    if not architecture.head:
        return []
    block = behind[0]
    number, like = int(block.split(".")[1]), [item for item in tensors if item.source.endswith("attn_q.weight")]
    last = like[-1].source.removesuffix("attn_q.weight")
    module, norms = architecture.head.format(layer=number), HEAD_PARTS[architecture.head]
    hidden = like[-1].shape[-1]
    parts = []
    for part, target in norms.items():
        shape = (hidden, 2 * hidden) if part == "eh_proj" else (hidden,)
        parts.append(WantedTensor(f"{block}nextn.{part}.weight", target.format(layer=number), shape, shape))
    wanted = [*(in_other_layer(item, number, module) for item in tensors if item.source.startswith(last)), *parts]
    there = file.tensors
    return wanted if all(name in there for item in wanted for name, _ in item.sources(there)) else []


OUTSIDE = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")
MTP = "mtp.layers.0"
HEAD_PARTS = {
    "model.layers.{layer}": {
        "eh_proj": "model.layers.{layer}.eh_proj.weight",
        "enorm": "model.layers.{layer}.enorm.weight",
        "hnorm": "model.layers.{layer}.hnorm.weight",
        "shared_head_norm": "model.layers.{layer}.shared_head.norm.weight",
    },
    MTP: {
        "eh_proj": "mtp.fc.weight",
        "enorm": "mtp.pre_fc_norm_embedding.weight",
        "hnorm": "mtp.pre_fc_norm_hidden.weight",
        "shared_head_norm": "mtp.norm.weight",
    },
}

_SILU = {"hidden_act": "silu"}
_PLAIN_ROUTER: dict[str, tuple[Any, ...]] = {
    "expert_gating_func": (SOFTMAX,),
    "expert_weights_scale": (1.0, 0.0),
    "expert_group_count": (1, 0),
    "expert_group_used_count": (1, 0),
    "leading_dense_block_count": (0,),
}
_NORMALISED = {**_PLAIN_ROUTER, "expert_weights_norm": (True,)}
_ABSOLUTE = {**_PLAIN_ROUTER, "expert_weights_norm": (False,)}
_GRANITE = {"attention_bias": False, "mlp_bias": False}
_LLAMA = Architecture("llama", "LlamaForCausalLM", _SILU, rules=INTERLEAVED)
_MIXTRAL = Architecture(
    *("mixtral", "MixtralForCausalLM", _SILU | {"sliding_window": None}, _NORMALISED, describe.experts_alone),
    rules=INTERLEAVED,
    scales_rope=False,
)
_GRANITE_MOE = Architecture(
    *("granitemoe", "GraniteMoeForCausalLM", _SILU | _GRANITE, _NORMALISED, describe.experts_alone), rules=INTERLEAVED
)
_GRANITE_SHARED = Architecture(
    *("granitemoehybrid", "GraniteMoeHybridForCausalLM", _GRANITE, _NORMALISED, describe.granite_shared),
    rules={
        **INTERLEAVED,
        r"shared_mlp\.input_linear\.": one_behind_another("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    },
)
_DELTA = {"norm_topk_prob": True}
_LATENT_RULES: dict[str, Rule] = {r"self_attn\.(kv_b_proj|embed_q|unembed_out)\.weight$": describe.keys_and_values}


def _deepseek(version: int) -> Architecture:
    config = {} if version == 3 else {"rope_scaling": {"type": "yarn", "factor": 1.0}}  # V2's model needs some scaling
    fixed = {} if version == 3 else {"expert_weights_norm": (False,)}
    return Architecture(
        *(f"deepseek_v{version}", f"DeepseekV{version}ForCausalLM", config, fixed, describe.latent_attention),
        rules=_LATENT_RULES,
        growth=describe.latent_growth,
    )


def _llama(hyper: Hyperparameters) -> Architecture:
    return _MIXTRAL if hyper.get("expert_count", 0) else _LLAMA


def _granite_moe(hyper: Hyperparameters) -> Architecture:
    return _GRANITE_SHARED if hyper.get("expert_shared_feed_forward_length", 0) else _GRANITE_MOE


def _deepseek2(hyper: Hyperparameters) -> Architecture:
    return _deepseek(3 if hyper.get("expert_gating_func", SOFTMAX) == SIGMOID else 2)


ARCHITECTURES: dict[str, Architecture | Callable[[Hyperparameters], Architecture]] = {
    "llama": _llama,
    "gemma": Architecture("gemma", "GemmaForCausalLM", rules=PLUS_ONE, scales_rope=False),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", describe=describe.gemma2, rules=PLUS_ONE, scales_rope=False),
    "gemma3": Architecture(
        *("gemma3_text", "Gemma3ForCausalLM", {"hidden_activation": "gelu_pytorch_tanh"}),
        describe=describe.gemma3,
        rules=PLUS_ONE,
        theta=1_000_000.0,
    ),
    "gemma3n": Architecture(
        *("gemma3n", "Gemma3nForConditionalGeneration"),
        describe=describe.gemma3n,
        rules={
            r"altup_projections\.": describe.one_of_stack("altup_proj.weight"),
            r"altup_unembed_projections\.": describe.one_of_stack("altup_unembd_proj.weight"),
        },
        inside=True,
    ),
    "gemma4": Architecture(
        *("gemma4_text", "Gemma4ForCausalLM"),
        describe=describe.gemma4,
        rules={
            r"router\.scale$": stored_as("ffn_gate_inp.scale"),
            r"router\.per_expert_scale$": stored_as("ffn_down_exps.scale"),
        },
        spent=(ROPE_FREQS,),
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _SILU),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _SILU),
    "qwen2moe": Architecture(
        *("qwen2_moe", "Qwen2MoeForCausalLM", _SILU | {"norm_topk_prob": False, "tie_word_embeddings": False}),
        *(_ABSOLUTE, describe.qwen2_experts),
        scales_rope=False,
    ),
    "qwen3moe": Architecture(
        *("qwen3_moe", "Qwen3MoeForCausalLM", _SILU | {"norm_topk_prob": True}, _PLAIN_ROUTER, describe.experts),
        scales_rope=False,
    ),
    "qwen3next": Architecture(
        *("qwen3_5_moe", "Qwen3NextForCausalLM", _DELTA, _PLAIN_ROUTER, describe.gated_delta),
        rules={
            r"linear_attn\.in_proj_b\.": describe.mixed_betas(0),
            r"linear_attn\.in_proj_a\.": describe.mixed_betas(1),
        },
        head=MTP,
    ),
    "qwen35": Architecture(
        *("qwen3_5", "Qwen3_5ForCausalLM", _DELTA, {}, describe.gated_delta), rules=describe.QWEN35_RULES, head=MTP
    ),
    "qwen35moe": Architecture(
        *("qwen3_5_moe", "Qwen3_5MoeForCausalLM", _DELTA, _PLAIN_ROUTER, describe.gated_delta),
        rules=describe.QWEN35_RULES,
        head=MTP,
    ),
    "olmoe": Architecture(
        *("olmoe", "OlmoeForCausalLM", _SILU | {"norm_topk_prob": False}, _PLAIN_ROUTER, describe.experts_alone)
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", _GRANITE, rules=INTERLEAVED),
    "granitemoe": _granite_moe,
    "granitehybrid": Architecture(
        *("granitemoehybrid", "GraniteMoeHybridForCausalLM", _GRANITE, {}, describe.granite_hybrid),
        rules=_GRANITE_SHARED.rules,
        scales_rope=False,
    ),
    "gpt-oss": Architecture(
        *("gpt_oss", "GptOssForCausalLM", {"tie_word_embeddings": False}, _NORMALISED, describe.gpt_oss)
    ),
    "mistral3": Architecture(
        *("ministral3", "Ministral3ForCausalLM"),
        describe=describe.temperatures,
        rules=INTERLEAVED,
        growth=lambda number: {"mscale": 1.0, "mscale_all_dim": number},
    ),
    "nemotron_h": Architecture("nemotron_h", "NemotronHForCausalLM", describe=describe.nemotron_h),
    "nemotron_h_moe": Architecture("nemotron_h", "NemotronHForCausalLM", describe=describe.nemotron_h),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", describe=describe.lfm2, scales_rope=False),
    "lfm2moe": Architecture(
        *("lfm2_moe", "Lfm2MoeForCausalLM", {"norm_topk_prob": True}),
        fixed={"expert_gating_func": (SIGMOID,)},
        describe=describe.lfm2,
        scales_rope=False,
    ),
    "minimax-m2": Architecture(
        *("minimax", "MiniMaxM2ForCausalLM", {"shared_intermediate_size": 0, "scoring_func": "sigmoid"}),
        fixed={"expert_gating_func": (SIGMOID, None)},
        describe=describe.experts_alone,
        scales_rope=False,
    ),
    "phi3": Architecture(
        *("phi3", "Phi3ForCausalLM"),
        describe=describe.phi3,
        spent=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", scales_rope=False),
    "glm4moe": Architecture(
        *("glm4_moe", "Glm4MoeForCausalLM", {"rope_scaling": None, "tie_word_embeddings": False}),
        fixed={"expert_gating_func": (SIGMOID,)},
        describe=describe.shared_experts,
        scales_rope=False,
        head="model.layers.{layer}",
    ),
    "deepseek2": _deepseek2,
    "mistral4": Architecture(
        *("mistral4", "Mistral4ForCausalLM", {}, {}),
        describe=lambda hyper, config: describe.latent_attention(hyper, config) | describe.temperatures(hyper, config),
        rules=_LATENT_RULES,
        growth=describe.latent_growth,
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 4}, rules=INTERLEAVED),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM"),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM"),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", scales_rope=False),
    "command-r": Architecture("cohere", "CohereForCausalLM", scales_rope=False),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", describe=describe.cohere2, scales_rope=False),
    "dots1": Architecture(
        *("dots1", "Dots1ForCausalLM"),
        fixed={"expert_gating_func": (SIGMOID,)},
        describe=describe.shared_experts,
        scales_rope=False,
    ),
    "nemotron": Architecture(
        *("nemotron", "NemotronForCausalLM", {"hidden_act": "relu2"}), rules=PLUS_ONE, scales_rope=False
    ),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", scales_rope=False),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", scales_rope=False),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", describe=describe.hunyuan),
    "hunyuan-moe": Architecture("hunyuan", "HunYuanMoEV1ForCausalLM", describe=describe.hunyuan),
}
