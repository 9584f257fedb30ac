"""The interface of a vision tower (vision encoder), and the language model of the same checkpoint.

A `VisionTower` encodes an image or a video of a request into features that replace the embeddings of its placeholder
tokens. A family is a class with this interface and a line in `loading`. Until pixels are needed, everything depends on
an item's layout alone, so that memory is known from headers. `encode` is for the engine thread alone.

`VisualInputs` are the features of a forward pass; some families add further ones to the hidden states behind the
model's first layers (`DeepStack`). `LanguagePart` describes the language model of a checkpoint where mlx-lm has no
class for the two together: its class for the language model alone loads that part of the config and of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from ingot.media.images import View
from ingot.media.items import MediaItem
from ingot.media.layout import Layout, Size
from ingot.models.layers.modules import adopt_module
from ingot.upstream import model_classes

PixelArray = NDArray[np.float32]
"""A tower's input, in the family's own shape. Its first axis is of patches or tiles."""

PositionArray = NDArray[np.int32]
"""[3, tokens]"""

EncodingSlices = Generator[Sequence[mx.array], None, "VisionFeatures"]
"""Encoding in slices: each yields the arrays to evaluate before the next, and the last returns features."""


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """The features of one image or video, in the order of its placeholder tokens."""

    embeddings: mx.array  # [features, hidden size]; replace the embeddings of tokens
    deep: tuple[mx.array, ...] = ()  # the same shape; each is added behind one of the model's first layers
    added: bool = False  # to the embeddings of tokens, instead of replacing them

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.embeddings, *self.deep)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class EncodingBytes:
    """The most memory that encoding an item takes: while the tower runs, pixels and work; afterwards features."""

    pixels: int
    work: int
    features: int

    @property
    def peak(self) -> int:
        return self.pixels + self.work + self.features


class VisionTower(Protocol):
    """`views`, `pixels`, `needs` and `positions` are for any thread; `encode` is for the engine thread alone."""

    @property
    def modules(self) -> Sequence[Any]:
        """MLX modules that hold its weights."""

    @property
    def deep(self) -> int:
        """The number of the model's first layers behind which features are added."""

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Which of three axes of positions each of the model's rotary frequencies uses; None: positions have one
        axis."""

    @property
    def bidirectional(self) -> bool:
        """Whether the tokens of an image all see each other, later ones too."""

    @property
    def stand_in(self) -> int | None:
        """The token that layers which look tokens up themselves see in the places of features; None: the prompt's."""

    def positions(self, length: int, items: Sequence[MediaItem]) -> PositionArray | None:
        """The positions of a prompt's tokens. None where `axes` is."""

    def views(self, size: Size, layout: Layout) -> Sequence[View]:
        """How a worker resizes each frame, which is of this size."""

    def pixels(self, item: MediaItem) -> PixelArray:
        """Its frames resized, normalised and cut as the family's own processor does. Raises BadMedia."""

    def encode(self, pixels: PixelArray, layout: Layout) -> EncodingSlices:
        """The features of `pixels`, of an item of this layout."""

    def needs(self, layout: Layout) -> EncodingBytes: ...


@dataclass(frozen=True, slots=True)
class VisualInputs:
    indices: mx.array  # [n]: indices of tokens in the pass
    embeddings: mx.array  # [n, hidden size]
    deep: tuple[mx.array, ...] = ()  # of the same shape; see `VisionFeatures`
    added: bool = False

    def over(self, embedded: mx.array) -> mx.array:
        """Embeddings of tokens [rows, width, size], with features in their places."""
        flat, features = embedded.reshape(-1, embedded.shape[-1]), self.embeddings.astype(embedded.dtype)
        flat[self.indices] = flat[self.indices] + features if self.added else features
        return flat.reshape(embedded.shape)

    def replacing(self, tokens: mx.array, stand_in: int) -> mx.array:
        """Tokens [rows, width], with this one in the places of features."""
        flat = tokens.reshape(-1)
        flat[self.indices] = stand_in
        return flat.reshape(tokens.shape)

    def behind(self, layers: DeepStack | None) -> AbstractContextManager[None]:
        """While this is open, the model's first layers add their features."""
        if not self.deep:
            return nullcontext()
        assert layers is not None, "the model's first layers were not swapped"
        return layers.adding(self.indices, self.deep)


class DeepStack:
    """Features that a forward pass adds behind its layers while `adding` is open."""

    def __init__(self) -> None:
        self._indices: mx.array | None = None
        self._features: tuple[mx.array, ...] = ()

    @contextmanager
    def adding(self, indices: mx.array, features: tuple[mx.array, ...]) -> Iterator[None]:
        """Behind layer i, features[i] [places, size] at those of the pass's tokens."""
        self._indices, self._features = indices, features
        try:
            yield
        finally:
            self._indices, self._features = None, ()

    def add_to(self, states: mx.array, layer: int) -> mx.array:
        if self._indices is None:
            return states
        flat = states.reshape(-1, states.shape[-1])
        return flat.at[self._indices].add(self._features[layer].astype(states.dtype)).reshape(states.shape)


class _AddsFeatures:
    _deepstack: DeepStack
    _number: int

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        states: mx.array = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self._deepstack.add_to(states, self._number)


@cache
def _deepstack_class(kind: type) -> type:
    """By the same name, so that the family's description of the class applies."""
    return type(kind.__name__, (_AddsFeatures, kind), {"__module__": kind.__module__})


def swap_deepstack_layers(model: Any, count: int) -> DeepStack | None:
    """Swap the model's first layers for ones behind which features can be added; None for no layers."""
    if not count:
        return None
    deepstack = DeepStack()
    first = {id(layer): number for number, layer in enumerate(model.layers[:count])}
    swapped = []
    for path, module in model.named_modules():
        number = first.get(id(module))
        if number is not None:
            kind: type = type(module)
            layer = adopt_module(module, _deepstack_class(kind))
            layer._deepstack, layer._number = deepstack, number
            swapped.append((path, layer))
    model.update_modules(tree_unflatten(swapped))
    return deepstack


FURTHER_CONFIG_NAMES: Final = ("llm_config", "language_config")
"""Keys of the language model's config in some checkpoints."""

ClassFinder = Callable[..., tuple[type, type]]


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """The model type of mlx-lm's class, and prefixes of weights' names in checkpoints and in that class. Of several
    prefixes the first that fits counts, and weights with none of them are not the language model's."""

    type: str | Callable[[dict[str, Any]], str] | None  # None: that of the language model's own config
    renamed: tuple[tuple[str, str], ...]
    config: str | None = "text_config"  # its key in the whole config; None: it is the whole one
    stated: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # its own config, made from the whole one
    parted: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] | None = None
    """The renamed weights as mlx-lm's class has them, by that config, where that splits and joins some."""
    fewer_scores: bool = False  # its output head has no rows for the last of the tokens that it embeds


LANGUAGE_PREFIXES: Final = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)
"""In checkpoints with a tower, older ones and newer."""
BARE_PREFIXES: Final = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    *((name, name) for name in ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")),
)
"""Where the language model's weights have the names that they have alone, and as mlx-vlm renames them."""


def language_classes(part: LanguagePart) -> ClassFinder:
    """Finds the classes of such a model, from the whole config."""

    def find_classes(config: dict[str, Any]) -> tuple[type, type]:
        own_config = _language_config(config, part)
        model_class, args_class = model_classes(config=own_config)
        layers = own_config.get("num_hidden_layers")
        base = _with_fewer_scores(model_class) if part.fewer_scores else model_class

        class Language(base):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                own = _weights_by_modules(weights, self)
                if own is None:
                    renamed = _language_weights(weights, part)
                    own = {name: weight for name, weight in renamed if not _is_behind(name, layers)}
                    own = own if part.parted is None else part.parted(own, own_config)
                return super().sanitize(own) if hasattr(base, "sanitize") else own

        class LanguageArgs(args_class):  # type: ignore[misc, valid-type]
            @classmethod
            def from_dict(cls, params: dict[str, Any]) -> Any:
                return args_class.from_dict(_language_config(params, part))

        return Language, LanguageArgs

    return find_classes


def _with_fewer_scores(model_class: type) -> type:
    """A model whose output head has as many rows as its files say. It never gives the last tokens, which have none."""

    class FewerScores(model_class):
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            own: dict[str, Any] = super().sanitize(weights) if hasattr(model_class, "sanitize") else weights
            if (head := own.get("lm_head.weight")) is not None:
                self.lm_head = nn.Linear(self.args.hidden_size, head.shape[0], bias=False)
            return own

        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            logits: mx.array = super().__call__(*args, **kwargs)
            unscored = max(0, self.args.vocab_size - logits.shape[-1])
            never = mx.full((*logits.shape[:-1], unscored), -mx.inf, dtype=logits.dtype)
            return mx.concatenate([logits, never], axis=-1) if unscored else logits

    return FewerScores


def _language_config(config: dict[str, Any], part: LanguagePart) -> dict[str, Any]:
    if part.stated is not None:
        return part.stated(config)
    names = () if part.config is None else (part.config, *FURTHER_CONFIG_NAMES)
    own = dict(next((config[name] for name in names if config.get(name)), {}) if names else config)
    if "head_dim" not in own and {"hidden_size", "num_attention_heads"} <= own.keys():
        own["head_dim"] = own["hidden_size"] // own["num_attention_heads"]
    kind = part.type(own) if callable(part.type) else part.type
    return {**own, "model_type": kind or own["model_type"]}


def _is_behind(name: str, layers: int | None) -> bool:
    """Whether a tensor is of a layer behind the model's: a draft head."""
    number = re.match(r"model\.layers\.(\d+)\.", name)
    return number is not None and layers is not None and int(number[1]) >= layers


def _weights_by_modules(weights: dict[str, Any], model: nn.Module) -> dict[str, Any] | None:
    """Those of a model's modules, where all have the names that they have there, as in a converted folder."""
    if not dict(tree_flatten(model.parameters())).keys() <= weights.keys():
        return None
    paths = {path for path, _ in model.named_modules() if path}
    return {name: weight for name, weight in weights.items() if name.rpartition(".")[0] in paths}


def _language_weights(weights: dict[str, Any], part: LanguagePart) -> Any:
    for name, weight in weights.items():
        for prefix, renamed in part.renamed:
            if name.startswith(prefix):
                yield renamed + name.removeprefix(prefix), weight
                break
