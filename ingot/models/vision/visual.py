"""What a forward pass is shown besides tokens: features of pictures and clips, at the places of some of its tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import mlx.core as mx

from ingot.models.layers.deepstack import DeepStack


@dataclass(frozen=True, slots=True)
class Visual:
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
