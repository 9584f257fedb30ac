"""Attention over mixed batches: one module for many families, whose variations are data.

It extends an attention module of mlx-lm's and owns its weights. An ordinary batch runs that module's own code. In a
mixed batch queries, keys and values of all tokens are computed at once and written to the pages; then each part of it
attends by itself, and the output is projected for all tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import QUERY_STRIDE, AppendState
from ingot.cache.forward_batch import AttentionMask, BatchMasks, ForwardBatch, MixedBatch, PerBatch, TokenPositions
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.paged_attention.selfcheck import CodedSample
from ingot.models.families.description import AttentionSpec
from ingot.models.families.registry import attention_spec_of
from ingot.models.layers.attention_backends import (
    NativeRotations,
    PagedKernelAttention,
    RaggedAttention,
    native_head_norm,
)
from ingot.models.layers.gpu_linear import JoinedLinear, join_linears
from ingot.models.layers.modules import extend
from ingot.models.layers.rope import KernelRope, KernelRopes, SharedRope, SharedRopes

QUERY_TILE = 32
"""Tokens of a prompt that attend together where attention is not fused: none of them sees the keys behind it, so that
less is computed for nothing, and less exists at once."""


@dataclass(frozen=True, slots=True)
class AttentionQueries:
    """The queries [tokens, heads, size] of a layer, rotated to their positions, and how attention scores them."""

    rotated: mx.array
    scale: float
    cap: float | None
    sinks: mx.array | None  # [heads]


class MixedAttention(nn.Module):
    """Computes what the module that it extends computes, for mixed batches too."""

    _spec: AttentionSpec
    _heads: int
    _kv_heads: int
    _scale: float
    _rotates: bool
    _shared_rope: SharedRope | None
    _cap: float | None
    _tile: int | None
    _ragged: RaggedAttention | None
    _prepared_ragged: RaggedAttention | None  # the same for queries and keys that are normed and rotated already
    paged_attention: PagedKernelAttention | None
    kernel_rope: KernelRope | None
    joined_qkv: JoinedLinear | None
    joined_out: JoinedLinear | None

    @property
    def native(self) -> bool:
        """Whether the native kernels compute it in mixed batches."""
        return self._ragged is not None

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, AppendState) or cache.whole is None:
            return super().__call__(x, mask=mask, cache=cache)
        return self._forward_mixed(x, mask, cache, cache.whole)

    def _forward_mixed(self, x: mx.array, masks: PerBatch | None, state: AppendState, mixed: MixedBatch) -> mx.array:
        ragged = self._prepared_ragged if mixed.three_axes else self._ragged
        if ragged is not None and ragged.covers(x, masks, state, mixed):
            if state.query_observer is not None:
                state.query_observer(self._project_queries(x, mixed))
            return self._attend_natively(ragged, x, masks, state, mixed)
        if (
            state.choice is None
            or mixed.tokens < QUERY_STRIDE
            or not isinstance(masks, BatchMasks)
            or masks.window is not None
        ):
            return self._forward_parts(x, masks, state, mixed)
        choosing = self._project_queries(x[:, QUERY_STRIDE - 1 :: QUERY_STRIDE], _page_choice_batch(mixed))
        with state.selecting_pages(choosing.rotated, choosing.scale, mixed):
            return self._forward_parts(x, masks, state, mixed)

    def _project_queries(self, x: mx.array, mixed: MixedBatch) -> AttentionQueries:
        return self._make_queries(self._prepare_qkv(x, mixed)[0][:, :, 0])

    def _make_queries(self, rotated: mx.array) -> AttentionQueries:
        return AttentionQueries(rotated, self._scale, self._cap, self._sinks)

    def _forward_parts(self, x: mx.array, masks: PerBatch | None, state: AppendState, mixed: MixedBatch) -> mx.array:
        queries, gate = self._write_kv(x, state, mixed)
        if state.query_observer is not None:
            state.query_observer(self._make_queries(queries))
        found = {} if self.paged_attention is None else self.paged_attention(queries, masks, state, mixed)
        joined = self._attend_parts(found, queries, masks, state, mixed) if isinstance(found, dict) else found
        flat = self._with_bidirectional(joined.reshape(mixed.tokens, -1), x, masks, state, mixed)
        if gate is not None:
            flat = flat * mx.sigmoid(gate)
        project = self[self._spec.out] if self.joined_out is None else self.joined_out
        return project(flat).reshape(1, mixed.tokens, -1)

    def _attend_parts(
        self,
        found: dict[int, mx.array],
        queries: mx.array,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
    ) -> mx.array:
        """The attention of all tokens, of which that of some parts is in `found` already."""
        each = queries[:, :, None]
        outputs = [
            found[number] if number in found else self._attend_part(number, part, each, masks, state, mixed)
            for number, part in enumerate(mixed.parts)
        ]
        return mixed.join_batch_heads(outputs)

    def _write_kv(self, x: mx.array, state: AppendState, mixed: MixedBatch) -> tuple[mx.array, mx.array | None]:
        """Queries [tokens, heads, size] and the output's gate, once keys and values are written.

        All are written before anything is read: pages can only be written in place while nobody waits to read them.
        """
        if self.kernel_rope is not None:
            projected, sizes = self._project_jointly(x, mixed)
            rotated = self.kernel_rope(projected, sizes, state, mixed)
            if rotated is not None:
                return rotated, self._gate(projected, sizes[0], mixed)
        queries, keys, values, gate = self._prepare_qkv(x, mixed)
        state.write(*(part.reshape(mixed.tokens, self._kv_heads, -1) for part in (keys, values)))
        return mx.contiguous(queries[:, :, 0]), gate

    def _project_jointly(self, x: mx.array, mixed: MixedBatch) -> tuple[mx.array, tuple[int, int]]:
        """Queries, keys and values [tokens, ...] concatenated, and the sizes of heads of keys and values."""
        if self.joined_qkv is None:
            queries, *parts = self._project(x)
            if self._spec.joint_head_norms:
                queries, parts[0] = self._norm_heads(queries, parts[0])
            keys, values = (part.shape[-1] // self._kv_heads for part in parts)
            return mx.concatenate([queries, *parts], axis=-1)[0], (keys, values)
        joint = self.joined_qkv(x.reshape(mixed.tokens, -1))
        if self._spec.joint_head_norms:
            joint = self._norm_jointly(joint)
        heads = self._heads * (2 if self._spec.gated else 1) + 2 * self._kv_heads
        return joint, (joint.shape[-1] // heads,) * 2

    def _norm_jointly(self, joint: mx.array) -> mx.array:
        """Queries, keys and values [tokens, ...] one behind another, the former normed as one each."""
        size = joint.shape[-1] // (self._heads + 2 * self._kv_heads)
        ends = [self._heads * size, (self._heads + self._kv_heads) * size]
        queries, keys, values = mx.split(joint, ends, axis=-1)
        return mx.concatenate([*self._norm_heads(queries, keys), values], axis=-1)

    def _gate(self, projected: mx.array, size: int, mixed: MixedBatch) -> mx.array | None:
        if not self._spec.gated:
            return None
        queries = projected[:, : 2 * self._heads * size].reshape(mixed.tokens, self._heads, 2, size)
        return queries[:, :, 1].reshape(mixed.tokens, -1)

    def _attend_part(
        self,
        number: int,
        part: ForwardBatch,
        queries: mx.array,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
    ) -> mx.array:
        """The attention [rows, heads, width, size] of a part's queries [tokens, heads, 1, size]."""
        mask = None if masks is None else masks.parts[number]
        with state.computing(part):
            return self._attend_tiled(mixed.split_batch_heads(number, queries), *state.keys_and_values(), mask)

    def _attend_natively(
        self, ragged: RaggedAttention, x: mx.array, masks: PerBatch | None, state: AppendState, mixed: MixedBatch
    ) -> mx.array:
        if ragged.prepares:
            queries, keys, values = self._project(x)
            gate = None
        else:
            queries, keys, values, gate = self._prepare_qkv(x, mixed)
            queries, keys, values = (y.reshape(1, mixed.tokens, -1) for y in (queries, keys, values))
        attended = ragged(queries, keys, values, masks, state, mixed)
        attended = self._with_bidirectional(attended[0], x, masks, state, mixed)[None]
        project: nn.Module = self[self._spec.out]
        return project(attended if gate is None else attended * mx.sigmoid(gate))

    def _with_bidirectional(
        self, attended: mx.array, x: mx.array, masks: PerBatch | None, state: AppendState, mixed: MixedBatch
    ) -> mx.array:
        """The attention [tokens, ...] of all tokens, computed again for those that also see later tokens."""
        window = masks.window if isinstance(masks, BatchMasks) else state.window
        for begin, end, own in mixed.bidirectional:
            queries, *_ = self._prepare_qkv(x[:, begin:end], own)
            with state.computing(own.parts[0]):
                keys, values = state.keys_and_values()
                mask = state.bidirectional_mask(window)
            seen = self._attend_tiled(own.split_batch_heads(0, queries), keys, values, mask)
            attended[begin:end] = own.join_batch_heads([seen])[0].astype(attended.dtype)
        return attended

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        if self._spec.joint is None:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        joint = self[self._spec.joint](x)
        size = joint.shape[-1] // (self._heads + 2 * self._kv_heads)
        queries, keys, values = mx.split(joint, [self._heads * size, (self._heads + self._kv_heads) * size], axis=-1)
        return queries, keys, values

    def _prepare_qkv(self, x: mx.array, mixed: MixedBatch) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """Queries, keys and values [tokens, heads, 1, size], rotated to their positions, and the output's gate.

        Each token is a row of its own, so that one RoPE rotates all of them.
        """
        spec, gate = self._spec, None
        queries, keys, values = self._project(x)
        if spec.joint_head_norms:
            queries, keys = self._norm_heads(queries, keys)
        queries = queries.reshape(mixed.tokens, self._heads, 1, -1)
        keys, values = (y.reshape(mixed.tokens, self._kv_heads, 1, -1) for y in (keys, values))
        if spec.gated:
            queries, gate = mx.split(queries, 2, axis=-1)
            gate = gate.reshape(mixed.tokens, -1)
        if not spec.joint_head_norms:  # some have a weight for each head, which stand next to a head's values
            queries, keys = (y[:, :, None] for y in self._norm_heads(queries[:, :, 0], keys[:, :, 0]))
        if self._rotates:
            queries, keys = self._rotate(queries, keys, mixed)
        return queries, keys, values, gate

    def _rotate(self, queries: mx.array, keys: mx.array, mixed: MixedBatch) -> tuple[mx.array, mx.array]:
        if self._shared_rope is not None and queries.dtype == keys.dtype == mx.float32:
            return self._shared_rope(queries, keys, mixed)
        if self._tile is not None:
            offset = TokenPositions(mixed.positions[..., None]) if mixed.three_axes else mixed.positions
            return self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        return self._rotate_by_part(queries, mixed), self._rotate_by_part(keys, mixed)

    def _rotate_by_part(self, x: mx.array, mixed: MixedBatch) -> mx.array:
        """Each part as the model's own code would: on GPUs a prompt's tokens are one row, not many."""
        rotated = []
        for number, part in enumerate(mixed.parts):
            own: mx.array = self.rope(mixed.split_batch_heads(number, x), offset=part.offset)
            rotated.append(own if part.width == 1 else own.swapaxes(1, 2).reshape(part.tokens, x.shape[1], 1, -1))
        return rotated[0] if len(rotated) == 1 else mx.concatenate(rotated)

    def _norm_heads(self, queries: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
        if self._spec.norms is None or self._spec.norms[0] not in self:
            return queries, keys
        of_queries, of_keys = self._spec.norms
        return self[of_queries](queries), self[of_keys](keys)

    def _attend_tiled(self, queries: mx.array, keys: mx.array, values: mx.array, mask: AttentionMask) -> mx.array:
        width, keyed = queries.shape[2], keys.shape[2]
        if self._tile is None or width <= self._tile:
            return self._attend(queries, keys, values, mask)
        tiles: list[mx.array] = []
        for begin in range(0, width, self._tile):
            end = min(begin + self._tile, width)
            seen, shown = keyed, mask
            if isinstance(mask, str):
                seen = keyed - width + end
            elif mask is not None:
                shown = mask[..., begin:end, :]
            tile = queries[:, :, begin:end]
            if tiles:  # one after another, or their scores would exist at once after all
                tile = mx.depends(tile, tiles[-1])
            tiles.append(self._attend(tile, keys[:, :, :seen], values[:, :, :seen], shown))
        return mx.concatenate(tiles, axis=2)

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: AttentionMask) -> mx.array:
        if self._cap is not None:
            return self._attend_capped(self._cap, queries, keys, values, mask)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._scale, mask=mask, sinks=self._sinks
        )

    @property
    def _sinks(self) -> mx.array | None:
        return None if self._spec.sinks is None else self[self._spec.sinks]

    def _attend_capped(
        self, cap: float, queries: mx.array, keys: mx.array, values: mx.array, mask: AttentionMask
    ) -> mx.array:
        rows, heads, width, size = queries.shape
        keyed = keys.shape[2]
        grouped = queries.reshape(rows, self._kv_heads, heads // self._kv_heads, width, size) * self._scale
        scores = cap * mx.tanh(grouped @ keys[:, :, None].swapaxes(-1, -2) / cap)
        if isinstance(mask, str):
            mask = mx.arange(keyed) <= mx.arange(keyed - width, keyed)[:, None]
        elif mask is not None:
            mask = mask[:, :, None]
        if mask is not None:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        return (mx.softmax(scores, axis=-1, precise=True) @ values[:, :, None]).reshape(queries.shape)


def _page_choice_batch(mixed: MixedBatch) -> MixedBatch:
    """The tokens whose queries choose the pages that a batch sees: the same for all layers."""
    if "page choice" not in mixed.memo:
        [part] = mixed.parts
        mixed.memo["page choice"] = MixedBatch((part.every(QUERY_STRIDE),))
    batch: MixedBatch = mixed.memo["page choice"]
    return batch


def mixed_attention_of(
    module: nn.Module,
    ropes: SharedRopes | None,
    ragged: NativeRotations | None,
    kernels: CheckedKernels | None,
    kernel_ropes: KernelRopes | None = None,
) -> MixedAttention | None:
    """The same attention for mixed batches too; None where its class is not known.

    `ropes` are the model's where MLX fuses neither attention nor RoPE; `ragged` are its rotations where attention is
    computed natively; `kernels` and `kernel_ropes` are those of a GPU.
    """
    spec = attention_spec_of(module)
    if spec is None:
        return None
    replacement: MixedAttention = extend(module, MixedAttention, "MixedBatch")
    replacement._spec = spec
    replacement._heads, replacement._kv_heads = attrgetter(spec.heads, spec.kv_heads)(module)
    replacement._scale = attrgetter(spec.scale)(module)
    replacement._rotates = "rope" in module and (spec.rotates is None or attrgetter(spec.rotates)(module))
    replacement._cap = None if spec.cap is None else attrgetter(spec.cap)(module)
    replacement._shared_rope = None if ropes is None else ropes.rope_for(module.get("rope"))
    replacement._tile = None if ropes is None else QUERY_TILE
    replacement._ragged = replacement._prepared_ragged = None
    if ragged is not None:
        replacement._ragged = _make_ragged_attention(replacement, ragged)
        replacement._prepared_ragged = _make_ragged_attention(replacement, ragged, prepares=False)
    replacement.paged_attention = None if kernels is None else _make_paged_attention(replacement, kernels)
    replacement.kernel_rope = None if kernel_ropes is None else _make_kernel_rope(replacement, kernel_ropes)
    replacement.joined_qkv = replacement.joined_out = None
    if replacement.kernel_rope is not None:
        replacement.joined_qkv = _joint_projection(replacement)
        replacement.joined_out = join_linears(module[spec.out], names=[spec.out])
    return replacement


def gathers_pages(model: nn.Module, layers: int) -> tuple[bool, bool]:
    """Whether pages are gathered for some of so many attention layers, in mixed batches of few tokens a row, and of
    more."""
    mixed = [module for _, module in model.named_modules() if isinstance(module, MixedAttention)]
    kernels = [module.paged_attention for module in mixed if not module.native]
    each = [(True, True) if paged is None else paged.gathers for paged in kernels]
    if len(mixed) < layers:
        each.append((True, True))
    return any(few for few, _ in each), any(many for _, many in each)


def check_coded_attention(model: nn.Module, sample: CodedSample) -> None:
    """Check all attention by kernels of a GPU that reads pages in fewer bits like these."""
    for _, module in model.named_modules():
        if isinstance(module, MixedAttention) and module.paged_attention is not None:
            module.paged_attention.check_coded(sample)


def _make_kernel_rope(module: MixedAttention, kernel_ropes: KernelRopes) -> KernelRope | None:
    spec = module._spec
    # Norms that span all heads come before the kernel.
    norms = [] if spec.joint_head_norms else [module[name] for name in spec.norms or () if name in module]
    return kernel_ropes.rope_for(
        heads=module._heads,
        kv_heads=module._kv_heads,
        rope=module.rope if module._rotates else None,
        norms=norms,
        gated=spec.gated,
    )


def _joint_projection(module: MixedAttention) -> JoinedLinear | None:
    """The query, key and value projections as one, where heads of keys and values are of one size."""
    if module._spec.joint is not None:
        return join_linears(module[module._spec.joint], names=[module._spec.joint])
    names = ("q_proj", "k_proj", "v_proj")
    layers = [module[name] for name in names]
    keys, values = (layer.weight.shape[0] for layer in layers[1:])
    return join_linears(*layers, names=names) if keys == values else None


def _make_paged_attention(module: MixedAttention, kernels: CheckedKernels) -> PagedKernelAttention:
    return PagedKernelAttention(
        kernels,
        heads=module._heads,
        kv_heads=module._kv_heads,
        scale=module._scale,
        cap=module._cap,
        sinks=module._sinks,
    )


def _make_ragged_attention(
    module: MixedAttention, rotations: NativeRotations, *, prepares: bool = True
) -> RaggedAttention:
    spec = module._spec
    norms = tuple(module[name] for name in spec.norms or () if name in module)
    return RaggedAttention(
        heads=module._heads,
        kv_heads=module._kv_heads,
        scale=module._scale,
        cap=module._cap,
        sinks=module._sinks,
        norms=[native_head_norm(norm, whole=spec.joint_head_norms) for norm in norms],
        rope=module.rope if module._rotates else None,
        rotations=rotations,
        gated=spec.gated,
        prepares=prepares,
    )
