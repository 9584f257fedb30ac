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
from ingot.cache.own_caches import CachePerRow
from ingot.models.families.description import DecoderSpec
from ingot.models.families.registry import decoder_spec_of
from ingot.models.layers.modules import extend, restored_module, swap_each

ROW_ARGUMENTS = "row arguments"
"""In the memo of a mixed batch: what mixers get of each row, by the names of their arguments."""


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


class RowArgumentsDecoder(nn.Module):
    """Of a mixed batch, has the code of the module that it extends make what layers get for each row alone, up to its
    first layer. Mixers find it in the batch's memo."""

    _decoder: DecoderSpec

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> Any:
        if cache is not None and isinstance(cache[0], CachePerRow):
            mixed, tokens = cache[0].mixed, inputs.reshape(1, -1)
            alone = [
                self._row_arguments(mixed.taken(number, tokens), [layer.own[number] for layer in cache])
                for number in range(len(mixed.parts))
            ]
            names = self._decoder.row_arguments
            mixed.memo[ROW_ARGUMENTS] = {name: PerBatch(mixed, tuple(each[name] for each in alone)) for name in names}
        return super().__call__(inputs, cache)

    def _row_arguments(self, tokens: mx.array, cache: Sequence[Any]) -> dict[str, Any]:
        """What the module gives its first layer. Nothing of it is computed yet."""
        plain = restored_module(self)
        plain[self._decoder.layers] = [_reached for _ in cache]
        try:
            plain(tokens, cache)
        except _FirstLayerReached as reached:
            return reached.arguments
        raise TypeError(f"{type(plain).__name__} runs no layers")


class _FirstLayerReached(Exception):
    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _reached(*_: Any, **arguments: Any) -> Any:
    raise _FirstLayerReached(arguments)


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
    replacement: Any = extend(module, RowArgumentsDecoder if spec.row_arguments else MixedDecoder, "Mixed")
    replacement._decoder = spec
    return replacement
