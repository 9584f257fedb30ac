"""The interface of a vision tower (vision encoder), and of what it shares a checkpoint with: the language model that
sees its features.

A `VisionTower` takes an image or a video of a request and gives features that stand where its placeholder tokens do. A
family is a class with this interface and a line in `loading`. What a tower says of an item depends on the item's layout
alone until pixels are asked for, so that memory is known from headers. `look` is for the engine thread alone.

A forward pass is shown features at the places of some of its tokens (`VisualInputs`); some families add further ones to
the hidden states behind the model's first layers (`DeepStack`). `LanguagePart` is the language model of such a
checkpoint where mlx-lm has no class for the two together: its class for the language model alone, which is given that
part of the config and of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from ingot.media.images import View
from ingot.media.items import MediaItem
from ingot.media.layout import Layout, Size
from ingot.models.layers.modules import adopt_module
from ingot.upstream import model_classes

PixelArray = NDArray[np.float32]
"""What a tower takes: the family says in which shape. Its first axis counts patches or tiles."""

PositionArray = NDArray[np.int32]
"""[3, tokens]"""

EncodingSlices = Generator[Sequence[mx.array], None, "VisionFeatures"]
"""The work of a tower in slices: each yields what is to be evaluated before the next, and the last returns features."""


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """What a model is shown of one picture or clip, in the order of its places."""

    embeddings: mx.array  # [features, hidden size]; stand where embeddings of tokens would
    deep: tuple[mx.array, ...] = ()  # the same shape; each is added behind one of the model's first layers

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.embeddings, *self.deep)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class EncodingBytes:
    """What looking at an item takes in memory, at most: while the tower runs, pixels and work; afterwards features."""

    pixels: int
    work: int
    features: int

    @property
    def peak(self) -> int:
        return self.pixels + self.work + self.features


class VisionTower(Protocol):
    """`views`, `pixels`, `needs` and `positions` are for any thread; `look` is for the engine's alone."""

    @property
    def modules(self) -> Sequence[Any]:
        """mlx modules that hold its weights."""

    @property
    def deep(self) -> int:
        """Behind how many of the model's first layers features are added."""

    @property
    def axes(self) -> tuple[int, ...] | None:
        """By which of three axes of positions each of the model's rotary frequencies turns; None: positions of the
        model's tokens are plain numbers."""

    @property
    def bidirectional(self) -> bool:
        """Whether the tokens of a run all see each other, those behind them too."""

    def positions(self, length: int, items: Sequence[MediaItem]) -> PositionArray | None:
        """Where each of a prompt's tokens stands. None where `axes` is."""

    def views(self, size: Size, layout: Layout) -> Sequence[View]:
        """What a worker makes of each frame, which is of this size."""

    def pixels(self, item: MediaItem) -> PixelArray:
        """Its frames resized, normalised and cut as the family's own processor does. Raises BadMedia."""

    def look(self, pixels: PixelArray, layout: Layout) -> EncodingSlices:
        """Features of what `pixels` gave for an item of this layout."""

    def needs(self, layout: Layout) -> EncodingBytes: ...


@dataclass(frozen=True, slots=True)
class VisualInputs:
    places: mx.array  # [n]: numbers of tokens in the pass
    embeddings: mx.array  # [n, hidden size]
    deep: tuple[mx.array, ...] = ()  # of the same shape; see `Features`

    def over(self, embedded: mx.array) -> mx.array:
        """What a model is given: embeddings of tokens [rows, width, size], but features where it is shown some."""
        flat = embedded.reshape(-1, embedded.shape[-1])
        flat[self.places] = self.embeddings.astype(embedded.dtype)
        return flat.reshape(embedded.shape)

    def behind(self, layers: DeepStack | None) -> AbstractContextManager[None]:
        """While this is open, the model's first layers add what is theirs."""
        if not self.deep:
            return nullcontext()
        assert layers is not None, "the model's layers were not swapped for what is added behind them"
        return layers.adding(self.places, self.deep)


class DeepStack:
    """What a forward pass adds behind its layers: nothing, but while `adding` is open."""

    def __init__(self) -> None:
        self._places: mx.array | None = None
        self._features: tuple[mx.array, ...] = ()

    @contextmanager
    def adding(self, places: mx.array, features: tuple[mx.array, ...]) -> Iterator[None]:
        """Behind layer i, features[i] [places, size] at those of the pass's tokens."""
        self._places, self._features = places, features
        try:
            yield
        finally:
            self._places, self._features = None, ()

    def added(self, layer: int, states: mx.array) -> mx.array:
        if self._places is None:
            return states
        flat = states.reshape(-1, states.shape[-1])
        return flat.at[self._places].add(self._features[layer].astype(states.dtype)).reshape(states.shape)


class _AddsFeatures:
    _deep: DeepStack
    _number: int

    def __call__(self, *given: Any, **named: Any) -> mx.array:
        states: mx.array = super().__call__(*given, **named)  # type: ignore[misc]
        return self._deep.added(self._number, states)


@cache
def _deepstack_class(kind: type) -> type:
    """By the same name: what is known of the class holds as long as nothing is added."""
    return type(kind.__name__, (_AddsFeatures, kind), {"__module__": kind.__module__})


def swap_deepstack_layers(model: Any, count: int) -> DeepStack | None:
    """Swap the model's first layers for ones behind which features can be added; None where that are none."""
    if not count:
        return None
    deep = DeepStack()
    first = {id(layer): number for number, layer in enumerate(model.layers[:count])}
    swapped = []
    for path, module in model.named_modules():
        number = first.get(id(module))
        if number is not None:
            kind: type = type(module)
            layer = adopt_module(module, _deepstack_class(kind))
            layer._deep, layer._number = deep, number
            swapped.append((path, layer))
    model.update_modules(tree_unflatten(swapped))
    return deep


OLDER_CONFIG_NAME = "llm_config"
"""What some checkpoints call it instead."""

OverEmbeddings = Callable[[Any, Any, Any], Any]
"""From the model, embeddings and the layers' states to logits."""

ClassFinder = Callable[..., tuple[type, type]]


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """What mlx-lm calls the class, and what checkpoints call its weights: names that begin so begin otherwise there.
    Of several beginnings the first that fits counts, and weights with none of them are not the language model's."""

    type: str | None  # None: the one that the language model's own config states
    renamed: tuple[tuple[str, str], ...]
    config: str | None = "text_config"  # where that is in the whole one; None: it is the whole one
    over: OverEmbeddings | None = None  # how the model runs over embeddings, where mlx-lm's class takes tokens alone


LANGUAGE_PREFIXES: Final = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("lm_head.", "lm_head."),
)
"""What checkpoints call a language model that stands beside its tower, older ones and newer."""


def language_classes(part: LanguagePart) -> ClassFinder:
    """What finds the classes of such a model, from the whole config."""

    def found(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = model_classes(config=_language_config(config, part))

        class Language(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                own = dict(_language_weights(weights, part))
                return super().sanitize(own) if hasattr(model_class, "sanitize") else own

            def __call__(self, inputs: Any, cache: Any = None, **given: Any) -> Any:
                embeddings = given.get("input_embeddings")
                if part.over is None or embeddings is None:
                    return super().__call__(inputs, cache=cache, **given)
                return part.over(self, embeddings, cache)

        class LanguageArgs(args_class):  # type: ignore[misc, valid-type]
            @classmethod
            def from_dict(cls, params: dict[str, Any]) -> Any:
                return args_class.from_dict(_language_config(params, part))

        return Language, LanguageArgs

    return found


def _language_config(config: dict[str, Any], part: LanguagePart) -> dict[str, Any]:
    own = dict(config if part.config is None else config.get(part.config) or config.get(OLDER_CONFIG_NAME) or {})
    return {**own, "model_type": part.type or own["model_type"]}


def _language_weights(weights: dict[str, Any], part: LanguagePart) -> Any:
    for name, weight in weights.items():
        for begins, instead in part.renamed:
            if name.startswith(begins):
                yield instead + name[len(begins) :], weight
                break
