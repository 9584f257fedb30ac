"""Decoders whose own code cannot run mixed batches: it counts positions, or makes masks, from a single number of stored
tokens.

Positions that are embedded, and not rotated by, are taken from the batch. Layers that see only tokens of the same chunk
get masks for rows of different lengths. While all rows are within their first chunk, chunks make no difference, and
attention runs by kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import ForwardBatch, MixedBatch, PerBatch, causal_mask
from ingot.models.families.description import DecoderSpec
from ingot.models.families.registry import decoder_spec_of
from ingot.models.layers.modules import extend, swap_each


class MixedDecoder(nn.Module):
    """Runs the layers of the module that it extends, with the positions and masks of the open batch."""

    _decoder: DecoderSpec

    @property
    def has_chunks(self) -> bool:
        """Whether some layers see only tokens of the same chunk."""
        return self._decoder.chunk_size is not None

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        first = None if cache is None else cache[0]
        if cache is None or not isinstance(first, AppendState) or (first.whole is None and self.has_chunks):
            plain: mx.array = super().__call__(inputs, cache)
            return plain
        spec = self._decoder
        whole = chunked = first.make_mask(inputs.shape[1])
        if spec.chunk_size is not None and first.whole is not None:
            chunked = chunk_masks(first.whole, getattr(self, spec.chunk_size)) or whole
        h = self[spec.embedding](inputs)
        if spec.positions is not None:
            h = h + self[spec.positions](first.opened.explicit.reshape(inputs.shape))
        for number, (layer, state) in enumerate(zip(self[spec.layers], cache, strict=True), start=1):
            h = layer(h, chunked if number % spec.whole_every else whole, cache=state)
        states: mx.array = self[spec.norm](h)
        return states


def chunk_masks(mixed: MixedBatch, size: int) -> PerBatch | None:
    """The masks of layers that see chunks of so many tokens; None where all tokens are in their row's first chunk."""
    mixed.memo["chunks"] = True  # lengths are read here: a step with other lengths is another graph
    if max(start + part.width for part in mixed.parts for start in part.starts) <= size:
        return None
    return PerBatch(mixed, tuple(_chunk_mask(part, size) for part in mixed.parts))


def _chunk_mask(part: ForwardBatch, size: int) -> mx.array:
    """[rows, 1, width, tokens of the longest row]."""
    end = max(part.starts) + part.width
    tokens = (mx.array(list(part.starts))[:, None] + mx.arange(part.width))[:, None, :, None]
    same = tokens // size == mx.arange(end) // size
    return same & causal_mask(part.starts, [0] * part.count, part.width, end, None)


def swap_decoders(model: nn.Module) -> int:
    """Swap every known decoder that cannot run mixed batches; returns how many were swapped."""
    return swap_each(model, _mixed_decoder)


def _mixed_decoder(module: nn.Module) -> nn.Module | None:
    spec = decoder_spec_of(module)
    if spec is None:
        return None
    replacement: MixedDecoder = extend(module, MixedDecoder, "Mixed")
    replacement._decoder = spec
    return replacement
