"""An encoder behind one face: rows of tokens in, a few numbers a row out, computed stage by stage.

Only the engine thread may run one. `run` is a generator so that the engine can let streams have their turn between
stages, however long a text is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.models.encoders.attention import TILE_BYTES
from ingot.models.encoders.padded import PaddedTexts
from ingot.models.layers.modules import parameters

Numbers: TypeAlias = "list[array[float]]"
Work: TypeAlias = "Generator[None, None, list[array[float]]]"


@dataclass(frozen=True, slots=True)
class EncoderTraits:
    """What the rest of the program may know of an encoder."""

    family: str
    vocab: int
    length: int  # the longest input, in tokens
    dimension: int  # numbers that a row becomes
    unit: bool  # vectors have length 1
    notes: tuple[str, ...] = ()


class Encoder(ABC):
    traits: EncoderTraits

    @abstractmethod
    def run(self, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Work:
        """Compute a batch. Each `next` does a bounded part of the work; the end's value has one entry a row."""

    @abstractmethod
    def batch_bytes(self, tokens: int, width: int) -> int:
        """Most memory that a batch of `tokens`, padding included, takes while it runs; `width` is its longest row."""

    def rest(self) -> None:
        """Nothing runs: give back the memory that mlx keeps for the next batch."""
        mx.clear_cache()

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @property
    @abstractmethod
    def dtype(self) -> str: ...


class TrunkEncoder(Encoder):
    """A BERT-type model. `model` has `stages`, and `finish` makes [rows, dimension] of what the last one gave."""

    def __init__(
        self, model: Any, finish: Any, traits: EncoderTraits, *, pad: int, hidden: int, inner: int, heads: int
    ) -> None:
        self._model, self._finish, self.traits = model, finish, traits
        self._pad, self._hidden, self._inner, self._heads = pad, hidden, inner, heads

    def run(self, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Work:
        rows = PaddedTexts.of(tokens, types, self._pad)
        last: mx.array | None = None
        for x in self._model.stages(rows):
            mx.async_eval(x)
            # The stage before is waited for while this one is computed, so that a device is never idle.
            if last is not None:
                mx.eval(last)
                yield
            last = x
        assert last is not None, "a model without layers"
        return numbers(self._finish(last, rows))

    def batch_bytes(self, tokens: int, width: int) -> int:
        return trunk_batch_bytes(tokens, width, hidden=self._hidden, inner=self._inner, heads=self._heads)

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(module for module in (self._model, self._finish) if isinstance(module, nn.Module))

    @property
    def dtype(self) -> str:
        return str(max(parameters(self._model), key=lambda found: found[1].size)[1].dtype).rsplit(".", 1)[-1]


def trunk_batch_bytes(tokens: int, width: int, *, hidden: int, inner: int, heads: int) -> int:
    # Of a stage the states, the heads' parts, and the inner layer before and after its activation; half as much of the
    # next one, which is begun before the first is waited for.
    states = 4 * tokens * (12 * hidden + 6 * inner)
    return states + min(3 * TILE_BYTES, 3 * 4 * heads * tokens * width)


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    return sum(weight.nbytes for module in modules for _, weight in parameters(module))


def numbers(x: mx.array) -> Numbers:
    """PaddedTexts of floats as plain values that any thread may hold."""
    values = np.asarray(x.astype(mx.float32))
    return [array("f", row.tobytes()) for row in values]
