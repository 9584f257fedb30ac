"""A head as a module: from hidden states and the tokens behind them to the hidden states of a guess.

Its layers are mlx-lm's, swapped like the model's own, and it keeps keys and values of its own: those of place p are of
the pair of the hidden state there and token p + 1. The embedding and the output head are the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.positions import Positions
from ingot.models.families.description import HeadWiring
from ingot.models.layers.modules import parameters
from ingot.models.vision.visual import Visual
from ingot.upstream import caches, create_attention_mask


@dataclass(frozen=True)
class Shared:
    """The model's modules that a head computes with, without owning them."""

    embedding: Any
    output: Any

    def logits(self, hidden: mx.array) -> mx.array:
        tied = isinstance(self.output, nn.Embedding | nn.QuantizedEmbedding)
        logits: mx.array = self.output.as_linear(hidden) if tied else self.output(hidden)
        return logits


class Guesser(Protocol):
    """What runs beside a model and guesses: a `Head`, or a draft that is called alike."""

    size: int  # of the model's hidden states that it takes
    sees: bool  # whether it is shown features where the model is

    @property
    def weight_bytes(self) -> int: ...
    def make_cache(self) -> list[Any]: ...
    def __call__(self, hidden: mx.array, tokens: mx.array, cache: Any = None) -> mx.array: ...
    def logits(self, hidden: mx.array) -> mx.array: ...


class Head(nn.Module):
    name = "mtp"
    sees = False

    def __init__(self, wiring: HeadWiring, alone: Any, shared: Shared | None, *, size: int, eps: float) -> None:
        """`alone` is a model of mlx-lm's that has the head's layers and no others. Without what it shares with its own
        model, a head can be looked at and not run."""
        super().__init__()
        self._wiring, self._given, self.size = wiring, shared, size
        assert [type(cache) for cache in caches.make_prompt_cache(alone)] == [caches.KVCache], (
            "what it keeps is asked for"
        )
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.joint = nn.Linear(2 * size, size, bias=False)
        self.layers = list(alone.layers)
        if wiring.norm is not None:
            self.norm = nn.RMSNorm(size, eps)

    @property
    def _shared(self) -> Shared:
        assert self._given is not None, "a head is run without its model"
        return self._given

    @property
    def wants(self) -> Literal["normed", "raw"]:
        """Which hidden states of the model it takes."""
        return self._wiring.wants

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for _, array in parameters(self))

    def make_cache(self) -> list[Any]:
        """What it keeps of a sequence, in the words of mlx-lm's models."""
        return [caches.KVCache()]

    def __call__(self, hidden: mx.array, tokens: mx.array, cache: Any = None, visual: Visual | None = None) -> mx.array:
        """From hidden states [1, T, size] at some places and the tokens [1, T] behind those: hidden states [1, T, size]
        whose logits are guesses for the tokens two places on, and which stand for the model's when guesses go on from
        guesses. Features that are `visual` stand where the model had them instead of tokens."""
        looked_up = self._shared.embedding(tokens)
        embedded = self._seen(looked_up if visual is None else visual.over(looked_up), cache)
        pair = [self.embedding_norm(embedded), self.hidden_norm(hidden.astype(embedded.dtype))]
        states: mx.array = self.joint(mx.concatenate(pair[::-1] if self._wiring.hidden_first else pair, axis=-1))
        mask = create_attention_mask(states, cache, return_array=self._wiring.array_masks)
        for layer in self.layers:
            states = layer(states, mask, cache)
        return states if self._wiring.norm is None else self.norm(states)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., vocab] of what `__call__` gave."""
        return self._shared.logits(hidden)

    def _seen(self, embedded: mx.array, cache: Any) -> mx.array:
        """Embeddings, zeros where the head was taught to see none."""
        if not self._wiring.blind_first:
            return embedded
        offset = 0 if cache is None else cache.offset
        if isinstance(offset, Positions):
            at = offset.at.reshape(-1, *embedded.shape[:2])[0]
        else:
            at = mx.arange(embedded.shape[1]) + mx.array(offset).reshape(-1, 1)
        return mx.where((at == 0)[..., None], 0, embedded)
