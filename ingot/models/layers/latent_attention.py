"""Latent attention over mixed batches, as DeepSeek's.

Where a model stores latents, queries are multiplied into the space of latents, so that all heads attend to the same
keys: a latent and its rotated part. The native kernels compute it like attention with one KV head.
"""

from __future__ import annotations

from operator import attrgetter

import mlx.core as mx

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import MixedBatch
from ingot.models.families.description import LatentSpec
from ingot.models.layers.attention import AttentionInputs, MixedAttention


class LatentAttention(MixedAttention):
    """Computes what the module that it extends computes, for mixed batches too."""

    @property
    def _latent_spec(self) -> LatentSpec:
        assert self._spec.latent is not None
        return self._spec.latent

    @property
    def _stores_latents(self) -> bool:
        return self._latent_spec.unpacked is None

    def _prepare_qkv(
        self, inputs: AttentionInputs, mixed: MixedBatch
    ) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """The same, with latents [tokens, 1, 1, rank] and what is rotated [tokens, 1, 1, size] as keys and values where
        these are stored."""
        spec, tokens = self._latent_spec, mixed.tokens
        queries = self._project_latent_queries(inputs.x).reshape(tokens, self._heads, 1, -1)
        unrotated = attrgetter(spec.unrotated)(self)
        plain, rotated_queries = mx.split(queries, [unrotated], axis=-1)
        both = self[spec.latent](inputs.x).reshape(tokens, 1, 1, -1)
        latents, rotated_keys = mx.split(both, [attrgetter(spec.rank)(self)], axis=-1)
        latents = _scaled(self[spec.latent_norm](latents), self, spec.latent_scale)
        rotated_queries, rotated_keys = self._rotate(rotated_queries, rotated_keys, mixed)
        if self._stores_latents:
            plain, keys, values = self._by_head(spec.into_latent, plain[:, :, 0])[:, :, None], latents, rotated_keys
        else:
            unpacked = self[spec.unpacked](latents.reshape(1, tokens, -1)).reshape(tokens, self._heads, 1, -1)
            keys, values = mx.split(unpacked, [unrotated], axis=-1)
            shared = mx.broadcast_to(rotated_keys, (tokens, self._heads, 1, rotated_keys.shape[-1]))
            keys = mx.concatenate([keys, shared], axis=-1)
        return self._scale_tokens(mx.concatenate([plain, rotated_queries], axis=-1), inputs), keys, values, None

    def _project_latent_queries(self, x: mx.array) -> mx.array:
        spec = self._latent_spec
        if spec.query in self:
            queries: mx.array = self[spec.query](x)
        else:
            down, norm, up = (self[name] for name in spec.query_latent)
            queries = up(norm(down(x)))
        return _scaled(queries, self, spec.query_scale)

    def _by_head(self, name: str, x: mx.array) -> mx.array:
        """A linear layer with weights for each head, of x [tokens, heads, size]."""
        y: mx.array = self[name](x.swapaxes(0, 1))
        return y.swapaxes(0, 1)

    def _read_kv(self, state: AppendState) -> tuple[mx.array, mx.array]:
        keys, values = state.keys_and_values()
        return (mx.concatenate([keys, values], axis=-1), keys) if self._stores_latents else (keys, values)

    def _unpack_output(self, attended: mx.array) -> mx.array:
        if not self._stores_latents:
            return attended
        by_head = attended.reshape(attended.shape[0], self._heads, -1)
        return self._by_head(self._latent_spec.out_of_latent, by_head).flatten(1)


def _scaled(x: mx.array, module: MixedAttention, name: str | None) -> mx.array:
    factor = None if name is None else attrgetter(name)(module)
    return x if factor is None else x * factor
