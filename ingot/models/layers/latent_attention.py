"""Latent attention over mixed batches, as DeepSeek's.

Where a model stores latents, queries are multiplied into the space of latents, so that all heads attend to the same
keys: a latent and its rotated part. Native kernels compute it like attention with one KV head, and those of GPUs read
each latent once, as a key and as a value. Where no kernel attends for prompts, latents are unpacked to keys and values
of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import AppendState
from ingot.cache.forward_batch import ForwardBatch, MixedBatch, PerBatch
from ingot.cache.kv_storage import KernelStorage
from ingot.kernels.packed_matmul.kernels import PackedFormat, PackedProduct, PackedWeights
from ingot.kernels.packed_matmul.selfcheck import CheckedPacked
from ingot.kernels.paged_attention.inputs import MOST_QUERIES
from ingot.models.families.description import LatentSpec
from ingot.models.layers.attention import AttentionInputs, MixedAttention
from ingot.models.layers.gpu_linear import JoinedLinear
from ingot.models.layers.modules import adopt_module, swap_each
from ingot.models.layers.rope import KernelLatentRope
from ingot.upstream import QuantizedMultiLinear


@dataclass(frozen=True, slots=True, eq=False)
class HeadProducts:
    """The products with weights for each head: into the space of latents, and out of it. Heads are to kernels what
    experts are."""

    into: tuple[PackedProduct, PackedWeights]
    out_of: tuple[PackedProduct, PackedWeights]


class LatentAttention(MixedAttention):
    """Computes what the module that it extends computes, for mixed batches too."""

    latent_rope: KernelLatentRope | None
    joined_latents: JoinedLinear | None
    """The projections of what queries are made from, and of latents."""
    joined_queries: JoinedLinear | None
    """The projection of queries, where these are made from latents."""
    head_products: HeadProducts | None
    """What graphs multiply by, where there are kernels for it."""

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
            self._keep_plain(plain[:, :, 0].swapaxes(0, 1), mixed)
            plain, keys, values = self._by_head(spec.into_latent, plain[:, :, 0])[:, :, None], latents, rotated_keys
        else:
            unpacked = self[spec.unpacked](latents.reshape(1, tokens, -1)).reshape(tokens, self._heads, 1, -1)
            keys, values = mx.split(unpacked, [unrotated], axis=-1)
            shared = mx.broadcast_to(rotated_keys, (tokens, self._heads, 1, rotated_keys.shape[-1]))
            keys = mx.concatenate([keys, shared], axis=-1)
        return self._scale_tokens(mx.concatenate([plain, rotated_queries], axis=-1), inputs), keys, values, None

    def _write_kv(
        self, inputs: AttentionInputs, state: AppendState, mixed: MixedBatch
    ) -> tuple[mx.array, mx.array | None]:
        turned = None if self.latent_rope is None else self._turn(self.latent_rope, inputs, state, mixed)
        return super()._write_kv(inputs, state, mixed) if turned is None else (self._scale_tokens(turned, inputs), None)

    def _turn(
        self, rope: KernelLatentRope, inputs: AttentionInputs, state: AppendState, mixed: MixedBatch
    ) -> mx.array | None:
        """Queries [tokens, heads, size], once latents are written; None where the kernel does not support the batch:
        then nothing is written."""
        spec, tokens = self._latent_spec, mixed.tokens
        storage = state.provided(1, rope.sizes, inputs.x.dtype) if rope.angles.supports(mixed) else None
        if not isinstance(storage, KernelStorage) or storage.dtype != inputs.x.dtype:
            return None
        x = inputs.x.reshape(tokens, -1)
        if self.joined_latents is None:
            queries, latents, at = self._project_latent_queries(x), self[spec.latent](x), 0
        else:
            latents = self.joined_latents(x)
            at = latents.shape[1] - sum(rope.sizes)
            queries = latents if spec.query in self else self._queries_of_latents(latents[:, :at])
        kernel = rope.kernel_for(queries.shape[1], latents.shape[1], at, x.dtype)
        if kernel is None:
            return None
        unrotated = attrgetter(spec.unrotated)(self)
        by_head = queries[:, : self._heads * (unrotated + rope.sizes[1])].reshape(tokens, self._heads, -1)
        plain = by_head[..., :unrotated].swapaxes(0, 1)
        embedded = self[spec.into_latent](plain)
        self._keep_plain(plain, mixed)
        angles, places = rope.angles.of_batch(mixed), state.places(storage)
        return storage.turn_latents(kernel, queries, latents, embedded, angles, places)

    def _keep_plain(self, plain: mx.array, mixed: MixedBatch) -> None:
        """Queries [heads, tokens, size] as prompts need them whose latents are unpacked."""
        if self.paged_attention is not None and any(part.width > MOST_QUERIES for part in mixed.parts):
            mixed.memo["unrotated queries", id(self)] = plain

    def _attend_rest(
        self,
        found: dict[int, mx.array],
        queries: mx.array,
        inputs: AttentionInputs,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
    ) -> mx.array:
        """Of prompts that no kernel attends for, latents are unpacked."""
        plain = mixed.memo.pop(("unrotated queries", id(self)), None)
        if plain is None or mixed.bidirectional:
            return super()._attend_rest(found, queries, inputs, masks, state, mixed)
        each = queries[:, :, None]
        attended = []
        for number, part in enumerate(mixed.parts):
            if number not in found and part.width > MOST_QUERIES:
                attended.append(self._attend_unpacked(number, part, plain, each, masks, state, mixed))
                continue
            own = found[number] if number in found else self._attend_part(number, part, each, masks, state, mixed)
            attended.append(self[self._latent_spec.out_of_latent](own))
        return mixed.join_batch_heads(attended).reshape(mixed.tokens, -1)

    def _attend_unpacked(
        self,
        number: int,
        part: ForwardBatch,
        plain: mx.array,
        queries: mx.array,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
    ) -> mx.array:
        """The attention [rows, heads, width, value size] of a part's queries: `plain` ones [heads, tokens, size] before
        they were multiplied into the space of latents, and others [tokens, heads, 1, size] behind it, with what is
        rotated."""
        spec, mask = self._latent_spec, None if masks is None else masks.parts[number]
        with state.computing(part):
            latents, rotated = state.keys_and_values()
        by_head = mixed.split_batch_heads(number, plain.swapaxes(0, 1)[:, :, None])
        turned = mixed.split_batch_heads(number, queries[..., latents.shape[-1] :])
        scores = (turned * self._scale) @ rotated.swapaxes(-1, -2)
        if isinstance(mask, str):
            width, keyed = scores.shape[-2:]
            mask = mx.arange(keyed) <= mx.arange(keyed - width, keyed)[:, None]
        if mask is not None:
            scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        keys = self[spec.into_latent](latents, transpose=False)
        values = self[spec.out_of_latent](latents)
        return mx.fast.scaled_dot_product_attention(by_head, keys, values, scale=self._scale, mask=scores)

    def _index_input(self, x: mx.array) -> mx.array:
        down, norm, _ = (self[name] for name in self._latent_spec.query_latent)
        normed: mx.array = norm(down(x))
        return normed

    def _project_latent_queries(self, x: mx.array) -> mx.array:
        spec = self._latent_spec
        if spec.query in self:
            queries: mx.array = _scaled(self[spec.query](x), self, spec.query_scale)
            return queries
        return self._queries_of_latents(self[spec.query_latent[0]](x))

    def _queries_of_latents(self, latents: mx.array) -> mx.array:
        spec = self._latent_spec
        _, norm, up = (self[name] for name in spec.query_latent)
        if self.joined_queries is not None and (latents.ndim == 2 or not self.joined_queries.needs_rows):
            up = self.joined_queries
        return _scaled(up(norm(latents)), self, spec.query_scale)

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


class UnpackedMultiLinear(QuantizedMultiLinear):
    """Multiplies by the weights of heads after dequantising them, for any number of tokens: MLX takes half a minute to
    compile its own product with them on CUDA, and they are small."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        packed = (self.weight, self.scales, self.get("biases"), self.group_size, self.bits, self.mode)
        weight = mx.dequantize(*packed, dtype=x.dtype)
        return x @ (weight.swapaxes(-1, -2) if transpose else weight)


def unpack_head_linears(model: nn.Module) -> int:
    """Swap the quantised linear layers with weights for each head; returns how many were swapped."""
    return swap_each(
        model,
        lambda module: adopt_module(module, UnpackedMultiLinear) if type(module) is QuantizedMultiLinear else None,
    )


def _scaled(x: mx.array, module: MixedAttention, name: str | None) -> mx.array:
    factor = None if name is None else attrgetter(name)(module)
    return x if factor is None else x * factor


def find_head_products(model: nn.Module, kernels: CheckedPacked) -> None:
    """Find the kernels of all latent attention of a model."""
    for module in model.modules():
        if isinstance(module, LatentAttention) and module._stores_latents:
            names = module._latent_spec.into_latent, module._latent_spec.out_of_latent
            into, out_of = (_head_product(module[name], kernels) for name in names)
            module.head_products = None if into is None or out_of is None else HeadProducts(into, out_of)


def _head_product(layer: nn.Module, kernels: CheckedPacked) -> tuple[PackedProduct, PackedWeights] | None:
    if "scales" not in layer or layer.get("biases") is None:
        return None
    packing = PackedFormat(layer.bits, layer.group_size, layer.mode)
    if not kernels.supports(packing):
        return None
    weights = PackedWeights.of(packing, layer.weight, layer.scales, layer.biases)
    product = kernels.of(weights)
    return None if product is None else (product, weights)
