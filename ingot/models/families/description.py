"""The vocabulary in which a model family is described. Nothing here computes; `models/layers` does.

Where a class of mlx-lm's has its own name for something, the description holds that name: an attribute, or a dotted
path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class SharedKvSpec:
    """Keys and values that several layers use."""

    argument: str | None = None  # in which a layer gets those of an earlier one; it returns them behind its output
    returned: tuple[str, ...] = ()  # further arguments, which it returns behind them
    projected: bool = False  # it gets projections, which it rotates and stores for itself, not what is stored
    reads: str | None = None  # whether a layer's cache is an earlier one's, which has stored them


@dataclass(frozen=True)
class LatentSpec:
    """Latent attention, in which keys and values of all heads are made from a latent of each token, and a part of keys
    that is rotated is the same for all heads. The names are DeepSeek's by default."""

    unpacked: str | None = None  # the projection to keys and values of heads, which are stored; None: latents are
    query: str = "q_proj"  # where queries are not made from latents
    query_latent: tuple[str, str, str] = ("q_a_proj", "q_a_layernorm", "q_b_proj")  # down, norm, up
    query_scale: str | None = None  # what queries are multiplied by
    latent: str = "kv_a_proj_with_mqa"  # the projection to latents and the rotated part
    latent_norm: str = "kv_a_layernorm"
    latent_scale: str | None = None  # what latents are multiplied by
    rank: str = "kv_lora_rank"  # numbers of a latent
    unrotated: str = "qk_nope_head_dim"  # numbers of a query that are not rotated, which come first
    into_latent: str = "embed_q"  # of these numbers of each head
    out_of_latent: str = "unembed_out"  # of what each head has attended to


@dataclass(frozen=True)
class IndexerSpec:
    """An indexer, which chooses the tokens that attention sees of long sequences, by queries and keys of its own. Its
    queries are made from the latents of queries, where attention has such. The names are DeepSeek's."""

    module: str | None = "indexer"  # what has the parts below; None: the attention module
    used: str | None = None  # whether there is one; always where None
    heads: str = "n_heads"
    top: str = "index_topk"  # how many tokens, or blocks of them, are chosen
    queries: str = "wq_b"
    query_norm: str | None = None
    keys: str = "wk"
    key_norm: str = "k_norm"
    rope: str = "rope"
    weights: str | None = "weights_proj"  # of heads, whose scores are added; None: each chooses for its KV heads
    block: str | None = None  # how many tokens are a block, of which the best one counts; None: single ones are chosen
    local: str | None = None  # how many of the newest blocks are always chosen


@dataclass(frozen=True)
class PositionScaleSpec:
    """Where there is no RoPE, queries are multiplied by 1 + scale * log(1 + floor((position + 1) / floor)). The names
    are Llama 4's."""

    used: str = "attn_temperature_tuning"  # whether they are
    floor: str = "floor_scale"
    scale: str = "attn_scale"


@dataclass(frozen=True)
class AttentionSpec:
    """An attention class: the names of the parts that all have, and which optional parts it has."""

    heads: str = "n_heads"
    kv_heads: str | int = "n_kv_heads"
    scale: str | None = "scale"  # None: one by the square root of a head's size
    out: str = "o_proj"
    projections: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")  # without the last, keys are values, too
    joint: str | None = None  # one projection gives queries, keys and values
    joint_by_group: bool = False  # those of a KV head lie together
    clip: str | None = None  # what joint queries, keys and values are clipped to, up and down
    conv: tuple[str, str] | None = (
        None  # over two tokens' keys and values: each head's weights of the one before and it
    )
    tiled_heads: bool = False  # a head attends to the KV head with its number modulo theirs, not to one with neighbours
    input_norm: str | None = None  # norms the states that are projected
    output_norm: str | None = None  # norms what all heads have attended to, before it is projected
    norms: tuple[str, str] | None = None  # of queries and keys, where the module has them
    norm_eps: str | float | None = None  # of norms of queries and keys that are no modules
    norm_weights: tuple[str, str] | None = None  # of such norms, for each number of each head; None: they have none
    normed: str | None = None  # whether there are such norms; always where None
    joint_head_norms: bool = False  # they norm all heads of a token as one
    norms_behind_rope: bool = False
    value_norm: str | None = None
    value_scale: str | None = None  # what values are multiplied by
    query_scale: str | None = None  # what queries are multiplied by: a number, or one for each head
    token_scale: str | None = None  # the argument with what queries are multiplied by: a number for each token
    position_scale: PositionScaleSpec | None = None
    rope: str = "rope"
    rope_periods: str | None = None  # of a RoPE that is no module
    rotates: str | tuple[str, ...] = ()  # any of these says whether its RoPE is used; always where none is named
    gated: bool = False  # the query projection also gives a gate for the output
    gate: str | None = None  # the projection of a gate for the output, for each head or each number, where there is one
    gate_act: Literal["sigmoid", "softplus"] = "sigmoid"
    sinks: str | None = None
    cap: str | None = None  # the soft cap of scores
    in_float32: bool = False  # it attends in float32
    shared_kv: SharedKvSpec | None = None
    mutual_in_windows: bool = False  # tokens that see each other do so in layers with a window alone
    indexer: IndexerSpec | None = None
    latent: LatentSpec | None = None  # it projects queries, keys and values so, and not by `projections`


@dataclass(frozen=True)
class DecoderSpec:
    """The module with a model's layers, where its own code counts positions or makes masks from the length of one
    row."""

    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    positions: str | None = None  # the embedding of positions, which is added to that of tokens
    chunk_size: str | None = None  # some layers see only tokens of the same chunk of so many
    whole_every: int = 4  # one of so many layers sees all tokens, the last of them
    row_arguments: tuple[str, ...] = ()  # what its code makes of the caches of one row, and gives all layers' mixers


@dataclass(frozen=True)
class RopeSpec:
    """A RoPE of the family's own class: position / periods is what it rotates by."""

    dims: str | None = "dims"  # None: nothing is rotated
    periods: str = "_freqs"


@dataclass(frozen=True)
class MlpSpec:
    """What an MLP computes: down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    act: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    gate: str | None = "gate_proj"  # None: nothing is gated
    up: str | None = "up_proj"  # None: one projection gives the gate and then the up part
    down: str = "down_proj"
    unless: str | None = None  # where this is a number, it computes something else


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts (MoE): which experts a router chooses for a token, and how it weighs what these give. Names
    may be dotted paths; what a module does not have is None there, or missing."""

    top: str = "top_k"  # how many experts a token has
    router: str = "gate"  # the router: a linear layer, or a module whose weight it multiplies by
    experts: str = "switch_mlp"
    scores: str = "softmax"  # or "sigmoid", or "logits", of which those chosen have a softmax; or the path of its name
    normed: str | bool = True  # whether chosen scores are divided by their sum
    eps: float = 0.0  # what is added to that sum
    bias: str | None = None  # added to scores where experts are chosen, not where they are weights
    groups: tuple[str, str] | None = None  # how many groups of experts there are, and how many may be chosen from
    scale: str | None = None  # what all weights are multiplied by
    factors: str | None = None  # what the weights of each expert are multiplied by
    later: bool = False  # of experts with the same score the later ones are chosen
    latent: str | None = None  # the size of what experts are given instead of hidden states, where it is another one
    shared: str | None = None  # an MLP that all tokens have, where there is one
    shared_gate: str | None = None  # whose sigmoid multiplies what that gives


def biased_moe(**options: Any) -> MoeSpec:
    """DeepSeek V3's, which many have taken over."""
    names: dict[str, Any] = {
        **{"top": "gate.top_k", "scores": "sigmoid", "normed": "gate.norm_topk_prob"},
        **{"bias": "gate.e_score_correction_bias", "groups": ("gate.n_group", "gate.topk_group")},
        **{"scale": "gate.routed_scaling_factor", "shared": "shared_experts"},
    }
    return MoeSpec(**{**names, **options})


@dataclass(frozen=True)
class NormSpec:
    """A norm of the family's own class."""

    kind: Literal["rms", "layer"]
    one_more: bool = False  # multiplies by one more than its weight
    of_heads: bool = False  # has a weight for each head: a norm of queries or keys


@dataclass(frozen=True)
class GatedDeltaSpec:
    """A gated delta net behind convolutions. The names are Qwen's by default. Several names for one thing are of
    projections behind one another."""

    sizes: tuple[str, str, str, str] = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    joint: bool = False  # queries, keys, values and gates of a key head lie together, and so do its two factors
    qkv: tuple[str, ...] = ("in_proj_qkv",)  # one projection of queries, keys and values, or one of each
    convolutions: tuple[str, ...] = ("conv1d",)  # likewise
    gates: tuple[tuple[str, ...], ...] = (("in_proj_z",),)  # a module has the first of these, or the next one
    strength: str = "in_proj_b"
    most_strength: str | None = None  # whether strengths are up to two, not one
    decay: tuple[str, ...] = ("in_proj_a",)
    decays_by_key: bool = False  # each number of a key has a decay of its own, not each head one
    decay_bound: str | None = None  # decays are exp(bound * sigmoid(...)) where the module has this bound
    gate_act: Literal["silu", "sigmoid"] = "silu"
    norm: str = "norm"
    out: str = "out_proj"


def kimi_delta(**options: Any) -> GatedDeltaSpec:
    """Kimi Delta Attention (KDA), which others have taken over."""
    names: dict[str, Any] = {
        "sizes": ("num_heads", "num_heads", "head_dim", "head_dim"),
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "convolutions": ("q_conv.conv", "k_conv.conv", "v_conv.conv"),
        "gates": (("g_proj",), ("g_a_proj", "g_b_proj")),
        "strength": "b_proj",
        "decay": ("f_a_proj", "f_b_proj"),
        **{"decays_by_key": True, "gate_act": "sigmoid", "norm": "o_norm", "out": "o_proj"},
    }
    return GatedDeltaSpec(**{**names, **options})


@dataclass(frozen=True)
class Mamba2Spec:
    """Mamba 2's scan behind a convolution, and the names of the parts of the norm behind it."""

    normed: str | None = None  # whether there is a norm; always where None
    eps: str = "norm.eps"
    norm_size: str = "intermediate_size"  # how many numbers are normed together
    norm_first: str | None = None  # whether the norm comes before the gate; never where None


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated convolution over a few tokens, as Liquid's."""


@dataclass(frozen=True)
class SelectiveScanSpec:
    """Mamba 1's scan behind a convolution. Steps, keys and queries may be normed."""

    norms: tuple[str, str, str] | None = None  # by these modules,
    normed: str = ""  # or, if this is true, without weights,
    eps: str | None = None  # with this


@dataclass(frozen=True)
class PlamoScanSpec:
    """PLaMo 2's scan behind a convolution."""


@dataclass(frozen=True)
class LightningSpec:
    """Lightning attention, linear attention whose heads each have one decay. The names are Bailing's."""


@dataclass(frozen=True)
class LinearUnitSpec:
    """Gated linear recurrent units (RG-LRU) behind a convolution. The names are RecurrentGemma's."""


@dataclass(frozen=True)
class GatedConvSpec:
    """Convolutions over keys and values, gated by queries. The names are GEAR's."""


ScanSpec = GatedConvSpec | SelectiveScanSpec | PlamoScanSpec | LightningSpec | LinearUnitSpec
RecurrenceSpec = GatedDeltaSpec | Mamba2Spec | ShortConvSpec | ScanSpec


@dataclass(frozen=True)
class LayerMoeSpec:
    """A mixture of experts whose parts are the layer's own, which also norms what the router and the experts are given.
    The names are Gemma 4's."""

    moe: MoeSpec = MoeSpec(  # in which a module's names are the layer's
        top="config.top_k_experts",
        router="router.proj",
        experts="experts.switch_glu",
        scores="logits",
        factors="router.per_expert_scale",
        later=True,
    )
    router_norm: tuple[str, str, str] = ("router.scale", "router._root_size", "router.eps")  # weights, times this; eps
    norm: str = "pre_feedforward_layernorm_2"  # of what experts are given


@dataclass(frozen=True)
class BranchSpec:
    """A part of a residual block to which those of other branches are added."""

    part: str | LayerMoeSpec
    norm_before: str | None = None
    norm_after: str | None = None


@dataclass(frozen=True)
class BlockSpec:
    """A residual block of a layer, `x + multiplier * norm_after(part(norm_before(x)))`, by the names of its parts."""

    parts: tuple[str, ...]  # a layer has the first of them, or the next one
    norm_before: str | None = None
    norm_after: str | None = None
    branches: tuple[BranchSpec, ...] = ()  # instead of a part: several, whose sum it is


@dataclass(frozen=True)
class LayerInputSpec:
    """An input that each layer gets besides hidden states, and its block, which comes last: `x + norm_after(
    projection(gelu(gate(x)) * input))`. The names are Gemma 4's."""

    gate: str = "per_layer_input_gate"  # None in layers without such a block
    projection: str = "per_layer_projection"
    norm_after: str = "post_per_layer_input_norm"


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer: its residual blocks, one after another."""

    blocks: tuple[BlockSpec, ...]
    layer_input: LayerInputSpec | None = None
    other: tuple[str, BlockSpec] | None = None  # where this is true, the last block is that one instead
    multiplier: str | None = None  # of what each block adds
    depth: str | None = None  # the number by whose square root that multiplier is divided
    clipped: bool = False  # sums in float16 are kept finite
    scale: str | None = None  # what the layer's output is multiplied by


def two_blocks(
    mixer: str | tuple[str, ...] = "self_attn",
    mlp: str = "mlp",
    *,
    before_mixer: str | None = "input_layernorm",
    after_mixer: str | None = None,
    before_mlp: str | None = "post_attention_layernorm",
    after_mlp: str | None = None,
    **options: Any,
) -> LayerSpec:
    """A layer of a mixer, the first that it has of those named, and an MLP, between the norms that there are."""
    mixers = (mixer,) if isinstance(mixer, str) else mixer
    blocks = BlockSpec(mixers, before_mixer, after_mixer), BlockSpec((mlp,), before_mlp, after_mlp)
    return LayerSpec(blocks, **options)


@dataclass(frozen=True)
class MtpSpec:
    """A draft head (MTP) that predicts the token after the next one, by a layer like the model's over pairs of an
    embedding and the hidden state before that token. Where checkpoints hold it, and the names of its parts: by default
    DeepSeek's.

    In names, `{layers}` is the model's number of layers.
    """

    inside: str = "layers.{layers}."  # the prefix of its tensors' names, after those of modules around the model
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    joint: str = "eh_proj"  # the projection of both
    norm: str | None = "shared_head.norm"  # before the output head; None: there is none
    layers: tuple[str, ...] = ("",)  # the prefixes of its layers' tensors, inside
    stored: str = "model.layers."  # the prefix of the model's own layers
    copies: tuple[str, ...] = ("embed_tokens.", "shared_head.head.")  # tensors that repeat the model's own
    output: str | None = None  # an output head of its own; None: the model's
    aliases: Mapping[str, str] = field(default_factory=dict)  # parts of names of its layers' tensors, and the model's
    alone: Mapping[str, Any] = field(
        default_factory=lambda: {"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1}
    )  # changes to the config that make a model of the head's layers; there may be others behind them
    by_layer: tuple[str, ...] = ()  # the config's lists by layer, if they go on with the head's
    window: str | None = None  # the config's key of how many tokens its layers see; None: all
    eps: str = "rms_norm_eps"  # the config's key of the norms' epsilon
    wants: Literal["normed", "raw"] = "normed"  # hidden states after the model's last norm, or before it
    normed_chain: bool = True  # its next draft tokens follow from its hidden states after its norm, not before
    hidden_first: bool = False  # the projection takes the hidden state first, not the embedding
    blind_first: bool = True  # the embedding in a sequence's first pair counts as zeros
    offset_norms: bool = False  # published checkpoints store norms' factors as their difference from one
    array_masks: bool = False  # its attention takes masks only as arrays


@dataclass(frozen=True)
class ModelFamily:
    """A module of mlx-lm's and descriptions of its classes, by their names. Other classes run their own code."""

    name: str  # the module's, which is the `model_type` of its configs
    attention: Mapping[str, AttentionSpec] = field(default_factory=dict)
    mlps: Mapping[str, MlpSpec] = field(default_factory=dict)  # classes that compute nothing else
    moes: Mapping[str, MoeSpec] = field(default_factory=dict)
    recurrences: Mapping[str, RecurrenceSpec] = field(default_factory=dict)
    expert_gates: Mapping[str, Literal["silu", "gelu_tanh"]] = field(default_factory=dict)  # activations of experts
    norms: Mapping[str, NormSpec] = field(default_factory=dict)
    ropes: Mapping[str, RopeSpec] = field(default_factory=dict)
    layers: Mapping[str, LayerSpec] = field(default_factory=dict)  # all of a model's may become one operation
    decoders: Mapping[str, DecoderSpec] = field(default_factory=dict)
    refused: str | None = None  # why it cannot be served
    unmixed: str | None = None  # why its own code cannot mix rows of different lengths, where no probe finds it
    apart_in_blocks: bool = False  # its code computes a few tokens of one row one by one, and rows of one token at once
    uncompiled: tuple[str, ...] = ()  # classes whose compiled functions go wrong with other lengths than their first
    text_only: tuple[str, ...] = ()  # the `model_type`s of models saved without the vision tower of this one
    head: MtpSpec | None = None  # the draft head that its checkpoints may hold

    @property
    def classes(self) -> frozenset[str]:
        """The names of all described classes."""
        return frozenset(
            (
                *(
                    *self.attention,
                    *self.mlps,
                    *self.moes,
                    *self.recurrences,
                    *self.norms,
                    *self.ropes,
                    *self.expert_gates,
                ),
                *(*self.decoders, *self.layers, *self.uncompiled),
            )
        )
