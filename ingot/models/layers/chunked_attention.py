"""Layers that see only tokens of the same chunk, in mixed batches.

Models with such layers make the masks from a single number of stored tokens, so rows of different lengths need masks
of ours. While all rows are within their first chunk, chunks make no difference, and attention runs by kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import ForwardBatch, MixedBatch, PerBatch, causal_mask
from ingot.models.families.description import ChunkedSpec
from ingot.models.families.registry import chunked_spec_of
from ingot.models.layers.modules import extend, swap_each


class ChunkedLayers(nn.Module):
    """Runs the layers of the module that it extends, with masks for mixed batches."""

    _chunks: ChunkedSpec

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        first = None if cache is None else cache[0]
        if cache is None or not isinstance(first, AppendState) or first.whole is None:
            plain: mx.array = super().__call__(inputs, cache)
            return plain
        spec, mixed = self._chunks, first.whole
        whole = first.make_mask(mixed.tokens)
        chunked = chunk_masks(mixed, getattr(self, spec.size)) or whole
        h = self[spec.embedding](inputs)
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


def swap_chunked_layers(model: nn.Module) -> int:
    """Swap every known stack of layers with chunked attention; returns how many were swapped."""
    return swap_each(model, _chunked_layers)


def _chunked_layers(module: nn.Module) -> nn.Module | None:
    spec = chunked_spec_of(module)
    if spec is None:
        return None
    replacement: ChunkedLayers = extend(module, ChunkedLayers, "Mixed")
    replacement._chunks = spec
    return replacement
