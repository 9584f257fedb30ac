"""The vocabulary in which a model family is described. Nothing here computes; `models/layers` does, by what these
records say.

Where a class of mlx-lm's has its own name for something, the description holds that name: an attribute's, or a path of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class AttentionSpec:
    """What a class of attention calls the parts that all of them have, and which of the rest it has."""

    heads: str = "n_heads"
    kv_heads: str = "n_kv_heads"
    scale: str = "scale"
    out: str = "o_proj"
    norms: tuple[str, str] | None = None  # of queries and keys, where the module has them
    joint_head_norms: bool = False  # they norm all heads of a token as one
    rotates: str | None = None  # says whether the module's RoPE is used; always where None, if it has one
    gated: bool = False  # the query projection also gives a gate for the output
    sinks: str | None = None
    joint: str | None = None  # one projection gives queries, keys and values
    cap: str | None = None  # what scores are capped at, softly


@dataclass(frozen=True)
class MlpSpec:
    """What an MLP computes: down(act(gate(x)) * up(x))."""

    act: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gate: str = "gate_proj"
    up: str | None = "up_proj"  # None: one projection gives the gate and, behind it, what is gated
    down: str = "down_proj"


@dataclass(frozen=True)
class NormSpec:
    """A norm of the family's own class; MLX's are known anyway."""

    kind: Literal["rms", "layer"]
    one_more: bool = False  # multiplies by one more than its weight
    of_heads: bool = False  # has a weight for each head: a norm of queries or keys


@dataclass(frozen=True)
class GatedDeltaSpec:
    """A gated delta net behind a convolution, as Qwen's."""

    joint: bool = False  # queries, keys, values and gates of a key head lie together, and so do its two factors


@dataclass(frozen=True)
class Mamba2Spec:
    """Mamba 2's scan behind a convolution, and what a class calls the parts of the norm behind it."""

    normed: str | None = None  # says whether there is a norm; always where None
    eps: str = "norm.eps"
    norm_size: str = "intermediate_size"  # how many neighbours are normed together
    norm_first: str | None = None  # says whether the norm comes before the gate; never where None


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated convolution over a few tokens, as Liquid's."""


RecurrenceSpec = GatedDeltaSpec | Mamba2Spec | ShortConvSpec


@dataclass(frozen=True)
class MtpSpec:
    """A head that guesses the token behind the next one, by a layer like the model's over pairs of a token's embedding
    and the hidden state before that token. Where checkpoints hold it, and what they call its parts: mostly what
    DeepSeek does.

    In names, `{layers}` stands for how many layers the model has.
    """

    inside: str = "layers.{layers}."  # what its tensors' names begin with, behind those of modules around the model's
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    joint: str = "eh_proj"  # the projection that makes one of both
    norm: str | None = "shared_head.norm"  # of what goes to the output head; None: nothing norms that
    layers: tuple[str, ...] = ("",)  # what the names of its layers' tensors begin with, inside
    stored: str = "model.layers."  # what those of the model's own layers begin with
    copies: tuple[str, ...] = ("embed_tokens.", "shared_head.head.")  # tensors that repeat the model's own
    alone: Mapping[str, Any] = field(
        default_factory=lambda: {"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1}
    )  # in the config, what makes a model of nothing but the head's layers
    eps: str = "rms_norm_eps"  # what the config calls that of the norms
    wants: Literal["normed", "raw"] = "normed"  # hidden states behind the model's last norm, or before it
    hidden_first: bool = False  # the projection takes the hidden state first, not the embedding
    blind_first: bool = True  # the embedding in a sequence's first pair counts as zeros
    offset_norms: bool = False  # published checkpoints store what norms multiply by as its difference from one
    array_masks: bool = False  # its attention takes masks as arrays alone


@dataclass(frozen=True)
class ModelFamily:
    """A module of mlx-lm's, and what is known of its classes by their names. What is not known runs its own code."""

    name: str  # the module's, which is the `model_type` of its configs
    attention: Mapping[str, AttentionSpec] = field(default_factory=dict)
    mlps: Mapping[str, MlpSpec] = field(default_factory=dict)  # classes that compute that and nothing else
    recurrences: Mapping[str, RecurrenceSpec] = field(default_factory=dict)
    norms: Mapping[str, NormSpec] = field(default_factory=dict)
    fused: tuple[str, ...] = ()  # layers of Llama's arithmetic, of which a model's all become one operation
    refused: str | None = None  # why its answers would be wrong
    unmixed: str | None = None  # why rows of unlike lengths go wrong together where no probe gets
    text_only: tuple[str, ...] = ()  # the `model_type`s of models saved without the vision part of this one
    head: MtpSpec | None = None  # what its checkpoints hold besides the model

    @property
    def classes(self) -> frozenset[str]:
        """The names of all classes that it describes."""
        return frozenset((*self.attention, *self.mlps, *self.recurrences, *self.norms, *self.fused))
