"""Indexers, which choose what attention sees of long sequences: the tokens, or blocks of them, with the highest scores.

An indexer scores earlier tokens by queries and keys of its own. Its keys are in pages beside those of its layer, in a
state of their own (`SplitKeys`). Rows that are not longer than what may be chosen
see everything, and attend by kernels; of others, a token that decodes reads the chosen keys, and those of prompts have
masks. Positions in a row are indices from its first token on, whatever other rows a batch has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import ForwardBatch, MixedBatch, causal_mask
from ingot.models.families.description import IndexerSpec
from ingot.models.layers.rope import rotate_parts

MOST_SCORES = 1 << 24
"""Scores of tokens that exist at once."""


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The keys that each row's only token sees, by their indices [rows, heads of choices, keys], and which of them."""

    at: mx.array
    seen: mx.array

    def take(self, stored: mx.array) -> mx.array:
        """Those of keys or values [rows, KV heads, tokens, size]."""
        return mx.take_along_axis(stored, self.at[..., None], axis=2)


class Indexer:
    """One layer's. It reads the weights of `parts`, which the model owns."""

    def __init__(self, parts: Any, spec: IndexerSpec, heads: int, kv_heads: int) -> None:
        """So many `heads` attend to so many `kv_heads`."""
        self._parts, self._spec, self._attending, self._kv_heads = parts, spec, heads, kv_heads
        self._heads, self._top = (attrgetter(name)(parts) for name in (spec.heads, spec.top))
        self._block = 1 if spec.block is None else attrgetter(spec.block)(parts)
        self._local = 0 if spec.local is None else attrgetter(spec.local)(parts)

    def is_narrow(self, part: ForwardBatch) -> bool:
        """Whether some row of a part does not see all of its tokens."""
        return max(part.starts) + part.width > self._top * self._block

    def write_keys(self, x: mx.array, state: AppendState, mixed: MixedBatch) -> None:
        """Store the keys of tokens x [1, tokens, size]."""
        spec, parts = self._spec, self._parts
        keys = parts[spec.key_norm](parts[spec.keys](x)).reshape(mixed.tokens, 1, 1, -1)
        rotated = rotate_parts(parts[spec.rope], keys, mixed)[:, :, 0]
        state.write(rotated, rotated)

    def choose(
        self, x: mx.array, project: Callable[[], mx.array], state: AppendState, mixed: MixedBatch
    ) -> dict[int, mx.array | ChosenTokens]:
        """What tokens see of the parts whose rows do not see everything, by the part's number: a mask [rows, heads,
        width, tokens], or the chosen keys. Queries are made from what `project` gives."""
        mixed.memo["indexer"] = True  # lengths are read here: a step with other lengths is another graph
        narrow = [number for number, part in enumerate(mixed.parts) if self.is_narrow(part)]
        if not narrow:
            return {}
        queries, weights = self._queries(project(), mixed), self._weights(x, mixed)
        found: dict[int, mx.array | ChosenTokens] = {}
        for number in narrow:
            part = mixed.parts[number]
            with state.computing(part):
                keys, _ = state.keys_and_values()
            own = None if weights is None else mixed.split_batch_heads(number, weights)
            found[number] = self._choose_for(part, mixed.split_batch_heads(number, queries), keys, own)
        return found

    def _queries(self, projected: mx.array, mixed: MixedBatch) -> mx.array:
        """[tokens, heads, 1, size], rotated."""
        spec, parts = self._spec, self._parts
        queries = parts[spec.queries](projected).reshape(mixed.tokens, self._heads, 1, -1)
        if spec.query_norm is not None:
            queries = parts[spec.query_norm](queries)
        return rotate_parts(parts[spec.rope], queries, mixed)

    def _weights(self, x: mx.array, mixed: MixedBatch) -> mx.array | None:
        """[tokens, heads, 1, 1], where the scores of all heads are added. Constant factors of theirs choose nothing."""
        if self._spec.weights is None:
            return None
        weights: mx.array = self._parts[self._spec.weights](x)
        return weights.reshape(mixed.tokens, self._heads, 1, 1)

    def _choose_for(
        self, part: ForwardBatch, queries: mx.array, keys: mx.array, weights: mx.array | None
    ) -> mx.array | ChosenTokens:
        """Of queries [rows, heads, width, size] and all keys [rows, 1, tokens, size]."""
        keyed = keys.shape[2]
        visible = causal_mask(part.starts, [0] * part.count, part.width, keyed, None)
        tile = max(1, MOST_SCORES // (part.count * self._heads * keyed))
        masks = []
        for begin in range(0, part.width, tile):
            some = slice(begin, begin + tile)
            seen, own = visible[:, :, some], None if weights is None else weights[:, :, some]
            scores = self._block_scores(self._scores(queries[:, :, some], keys, own), seen)
            # Of equal scores the earlier one, however many tokens of longer rows are behind it.
            chosen = mx.argsort(-scores, axis=-1)[..., : self._top]
            if part.width == 1 and scores.shape[1] in (1, self._kv_heads):
                return self._tokens_of(chosen[:, :, 0], part)
            masks.append(self._mask_of(chosen, scores.shape, seen))
        return masks[0] if len(masks) == 1 else mx.concatenate(masks, axis=2)

    def _scores(self, queries: mx.array, keys: mx.array, weights: mx.array | None) -> mx.array:
        """Scores [rows, heads, width, tokens] of all keys; of one head where those of all are added."""
        if weights is None:
            return queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
        by_token = mx.maximum(queries.swapaxes(1, 2) @ keys.swapaxes(-1, -2), 0)
        return (weights.transpose(0, 2, 3, 1) @ by_token).swapaxes(1, 2)

    def _block_scores(self, scores: mx.array, seen: mx.array) -> mx.array:
        """The best of each block's tokens that are `seen` [rows, 1, width, tokens]; the newest blocks come first."""
        scores = mx.where(seen, scores, -mx.inf)
        if self._spec.block is None:
            return scores
        missing = -scores.shape[-1] % self._block
        padded = mx.pad(scores, [*[(0, 0)] * 3, (0, missing)], constant_values=-mx.inf)
        best = padded.reshape(*scores.shape[:-1], -1, self._block).max(axis=-1)
        own = (seen.sum(axis=-1, keepdims=True) - 1) // self._block  # the block of each token
        blocks = mx.arange(best.shape[-1])
        return mx.where((blocks <= own) & (blocks > own - self._local), mx.inf, best)

    def _tokens_of(self, chosen: mx.array, part: ForwardBatch) -> ChosenTokens:
        """Of chosen blocks [rows, heads, blocks] of rows with one token each."""
        at = (chosen[..., None] * self._block + mx.arange(self._block)).flatten(-2).astype(mx.int32)
        last = mx.array(list(part.starts), dtype=mx.int32)[:, None, None]
        seen = mx.repeat((at <= last)[:, :, None], self._attending // at.shape[1], axis=1)
        return ChosenTokens(mx.minimum(at, max(part.starts)), seen)

    def _mask_of(self, chosen: mx.array, shape: tuple[int, ...], seen: mx.array) -> mx.array:
        """[rows, heads or 1, width, tokens]."""
        kept = mx.put_along_axis(mx.zeros(shape, dtype=mx.bool_), chosen, mx.array(True), axis=-1)
        kept = mx.repeat(kept, self._block, axis=-1)[..., : seen.shape[-1]] & seen
        return kept if kept.shape[1] == 1 else mx.repeat(kept, self._attending // kept.shape[1], axis=1)


def has_indexer(module: nn.Module, spec: IndexerSpec | None) -> bool:
    """Whether an attention module has one."""
    return spec is not None and (spec.used is None or bool(attrgetter(spec.used)(module)))


def indexer_of(module: nn.Module, spec: IndexerSpec | None, heads: int, kv_heads: int) -> Indexer | None:
    """That of an attention module, where it has one."""
    if spec is None or not has_indexer(module, spec):
        return None
    return Indexer(module if spec.module is None else module[spec.module], spec, heads, kv_heads)
