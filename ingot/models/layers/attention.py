"""Attention over mixed batches: one module for many families, whose variations are data.

It extends an attention module of mlx-lm's and owns its weights. An ordinary batch runs that module's own code. In a
mixed batch queries, keys and values of all tokens are computed at once and written to the pages; then each part of it
attends by itself, and the output is projected for all tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.attention_state import QUERY_STRIDE, AppendState, CompositeState, EqualHeads
from ingot.cache.forward_batch import AttentionMask, BatchMasks, ForwardBatch, MixedBatch, PerBatch, TokenPositions
from ingot.cache.layer_state import RecurrentState
from ingot.models.families.description import AttentionSpec, PositionScaleSpec
from ingot.models.layers.attention_backends import PagedKernelAttention, RaggedAttention, attend_capped
from ingot.models.layers.gpu_linear import JoinedLinear
from ingot.models.layers.indexer import ChosenTokens, Indexer
from ingot.models.layers.norms import PlainNorm
from ingot.models.layers.rope import KernelRope, SharedRope, rotate_parts

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


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What a layer computes tokens from."""

    x: mx.array  # [1, tokens, ...]
    token_scale: mx.array | None = None  # [tokens]: what their queries are multiplied by
    projected: tuple[mx.array, mx.array] | None = None  # [1, tokens, ...]: keys and values that layers share
    raw: tuple[mx.array, mx.array, mx.array] | None = None  # [1, tokens, ...]: what is projected, convolved already
    index: AppendState | None = None  # the keys of the layer's indexer

    def taken(self, tokens: slice) -> AttentionInputs:
        return AttentionInputs(
            self.x[:, tokens],
            None if self.token_scale is None else self.token_scale[tokens],
            None if self.projected is None else (self.projected[0][:, tokens], self.projected[1][:, tokens]),
            None if self.raw is None else (self.raw[0][:, tokens], self.raw[1][:, tokens], self.raw[2][:, tokens]),
        )


@dataclass(frozen=True, slots=True)
class CallNames:
    """The names of the arguments of a class of attention, in order, and which of them is the mask."""

    names: tuple[str, ...]
    mask: str


class MixedAttention(nn.Module):
    """Computes what the module that it extends computes, for mixed batches too."""

    _spec: AttentionSpec
    _call: CallNames
    _heads: int
    _kv_heads: int
    _scale: float
    _plain_norm: PlainNorm | None  # of queries and keys
    _rope: nn.Module | None
    _shared_rope: SharedRope | None
    _cap: float | None
    _tile: int | None
    _ragged: RaggedAttention | None
    _prepared_ragged: RaggedAttention | None  # the same for queries and keys that are normed and rotated already
    paged_attention: PagedKernelAttention | None
    kernel_rope: KernelRope | None
    joined_qkv: JoinedLinear | None
    joined_out: JoinedLinear | None
    joined_gate: JoinedLinear | None
    """Of the output, where it is a projection of its own."""
    kv_layout: EqualHeads | None
    """How the native kernels read keys and values."""
    token_indexer: Indexer | None
    reads_stored_kv: bool
    """Whether it attends to keys and values that an earlier layer has stored."""

    @property
    def native(self) -> bool:
        """Whether the native kernels compute it in mixed batches."""
        return self._ragged is not None

    @property
    def is_plain_around_attention(self) -> bool:
        """Whether only projections come before the norms and RoPE of queries and keys, and only these and a gate behind
        attention."""
        spec = self._spec
        given = spec.shared_kv is not None and spec.shared_kv.projected
        odd = (spec.input_norm, spec.output_norm, spec.position_scale, spec.latent, spec.value_scale, spec.clip)
        return not given and not spec.tiled_heads and spec.conv is None and all(each is None for each in odd)

    @property
    def keys_as_values(self) -> bool:
        """Whether values are keys, before these are normed and rotated."""
        spec = self._spec
        given = spec.shared_kv is not None and spec.shared_kv.projected
        own = spec.joint is None and spec.latent is None and not given and not self.reads_stored_kv
        return own and spec.projections[2] not in self

    def __call__(self, *args: Any, **options: Any) -> Any:
        given, shared = dict(zip(self._call.names, args, strict=False)) | options, self._spec.shared_kv
        earlier = None if shared is None or shared.argument is None else given.get(shared.argument)
        state = own = earlier if isinstance(earlier, AppendState) else given.get("cache")
        if isinstance(own, CompositeState):
            state = next(each for each in own.caches if isinstance(each, AppendState))
        if not isinstance(state, AppendState) or state.whole is None:
            return super().__call__(*args, **options)
        inputs = self._inputs(given, earlier, state.whole)
        if isinstance(own, CompositeState):
            inputs = self._with_further_states(inputs, own, state.whole)
        output = self._forward_mixed(inputs, given.get(self._call.mask), state, state.whole)
        if shared is None or shared.argument is None:
            return output
        return output, inputs.projected if shared.projected else state, *map(given.get, shared.returned)

    def _with_further_states(
        self, inputs: AttentionInputs, states: CompositeState, mixed: MixedBatch
    ) -> AttentionInputs:
        """The same, of a layer that keeps something besides keys and values."""
        if self.token_indexer is not None and isinstance(index := states.caches[1], AppendState):
            return replace(inputs, index=index)
        if self._spec.conv is None:
            return inputs
        queries, *stored = self._project_raw(inputs)
        tails = next(each for each in states.caches if isinstance(each, RecurrentState))
        keys, values = (self._convolve(each, tails, number, mixed) for number, each in enumerate(stored))
        return replace(inputs, raw=(queries, keys, values))

    def _convolve(self, x: mx.array, tails: RecurrentState, number: int, mixed: MixedBatch) -> mx.array:
        """Keys or values [1, tokens, ...], to which those of the tokens before them are added. The last ones are
        kept."""
        assert self._spec.conv is not None
        before, own = mx.split(self[self._spec.conv[number]].reshape(self._kv_heads, 2)[..., None], 2, axis=1)
        by_head, found = x.reshape(mixed.tokens, self._kv_heads, 1, -1), []
        for place, part in enumerate(mixed.parts):
            each = mixed.split_batch_heads(place, by_head)
            with tails.computing(part):
                tail = tails[number]
                first = mx.zeros_like(each[:, :, :1]) if tail is None else tail
                tails[number] = each[:, :, -1:]
            found.append(mx.concatenate([first, each[:, :, :-1]], axis=2) * before + each * own)
        return mixed.join_batch_heads(found)

    def _inputs(self, given: dict[str, Any], earlier: Any, mixed: MixedBatch) -> AttentionInputs:
        """`earlier`: what an earlier layer returned for this one."""
        spec, x = self._spec, given[self._call.names[0]]
        if spec.input_norm is not None:
            x = self[spec.input_norm](x)
        scale = None if spec.token_scale is None else given.get(spec.token_scale)
        if scale is not None:
            scale = scale.reshape(mixed.tokens)
        if self._rope is None and spec.position_scale is not None:
            scale = self._position_scale(spec.position_scale, mixed)
        if spec.shared_kv is None or not spec.shared_kv.projected:
            return AttentionInputs(x, scale)
        return AttentionInputs(x, scale, self._project_kv(x) if earlier is None else earlier)

    def _position_scale(self, spec: PositionScaleSpec, mixed: MixedBatch) -> mx.array | None:
        used, floor, scale = attrgetter(spec.used, spec.floor, spec.scale)(self)
        return 1 + scale * mx.log(1 + mx.floor((mixed.positions + 1) / floor)) if used else None

    def _forward_mixed(
        self, inputs: AttentionInputs, masks: PerBatch | None, state: AppendState, mixed: MixedBatch
    ) -> mx.array:
        ragged = self._prepared_ragged if mixed.three_axes else self._ragged
        if self.reads_stored_kv and ("stored", state) not in mixed.memo:
            ragged = None
        if self.token_indexer is not None and inputs.index is not None:
            self.token_indexer.write_keys(inputs.x, inputs.index, mixed)
            ragged = None if any(map(self.token_indexer.is_narrow, mixed.parts)) else ragged
        if ragged is not None and ragged.covers(inputs.x, masks, state, mixed):
            if state.query_observer is not None and not self.reads_stored_kv:
                state.query_observer(self._project_queries(inputs, mixed))
            return self._attend_natively(ragged, inputs, masks, state, mixed)
        if (
            state.choice is None
            or self.token_indexer is not None
            or mixed.tokens < QUERY_STRIDE
            or not isinstance(masks, BatchMasks)
            or masks.window is not None
        ):
            return self._forward_parts(inputs, masks, state, mixed)
        choosing = inputs.taken(slice(QUERY_STRIDE - 1, None, QUERY_STRIDE))
        queries = self._project_queries(choosing, _page_choice_batch(mixed))
        with state.selecting_pages(queries.rotated, queries.scale, mixed):
            return self._forward_parts(inputs, masks, state, mixed)

    def _project_queries(self, inputs: AttentionInputs, mixed: MixedBatch) -> AttentionQueries:
        return self._make_queries(self._prepare_queries(inputs, mixed)[:, :, 0])

    def _make_queries(self, rotated: mx.array) -> AttentionQueries:
        return AttentionQueries(rotated, self._scale, self._cap, self._sinks)

    def _forward_parts(
        self, inputs: AttentionInputs, masks: PerBatch | None, state: AppendState, mixed: MixedBatch
    ) -> mx.array:
        queries, gate = self._write_kv(inputs, state, mixed)
        if state.query_observer is not None and not self.reads_stored_kv:
            state.query_observer(self._make_queries(queries))
        chosen = self._choose_keys(inputs, mixed)
        found = {} if self.paged_attention is None else self.paged_attention(queries, masks, state, mixed, chosen)
        if isinstance(found, dict) and chosen:
            found, masks = self._attend_chosen(chosen, found, queries, masks, state, mixed)
        if isinstance(found, dict):
            flat = self._attend_rest(found, queries, inputs, masks, state, mixed)
        else:
            flat = self._finish(found, inputs, masks, state, mixed)
        flat = self._gate_output(flat, gate, inputs)
        project = self[self._spec.out] if self.joined_out is None else self.joined_out
        return project(flat).reshape(1, mixed.tokens, -1)

    def _choose_keys(self, inputs: AttentionInputs, mixed: MixedBatch) -> dict[int, mx.array | ChosenTokens]:
        """What an indexer chooses for the parts whose tokens do not see all others."""
        if self.token_indexer is None or inputs.index is None:
            return {}
        return self.token_indexer.choose(inputs.x, lambda: self._index_input(inputs.x), inputs.index, mixed)

    def _index_input(self, x: mx.array) -> mx.array:
        """What the queries of an indexer are made from."""
        return x

    def _attend_chosen(
        self,
        chosen: dict[int, mx.array | ChosenTokens],
        found: dict[int, mx.array],
        queries: mx.array,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
    ) -> tuple[dict[int, mx.array], PerBatch]:
        """What is `found`, with the attention of parts that read only chosen keys; and masks of the other ones."""
        found, shown = dict(found), [None] * len(mixed.parts) if masks is None else list(masks.parts)
        for number, choice in chosen.items():
            if isinstance(choice, mx.array):
                shown[number] = choice
                continue
            own = mixed.split_batch_heads(number, queries[:, :, None])
            with state.computing(mixed.parts[number]):
                keys, values = map(choice.take, self._read_kv(state))
            found[number] = self._attend(own, keys, values, choice.seen)
        return found, PerBatch(mixed, tuple(shown))

    def _finish(
        self, attended: mx.array, inputs: AttentionInputs, masks: PerBatch | None, state: AppendState, mixed: MixedBatch
    ) -> mx.array:
        """The attention [tokens, ...] of all tokens as it is gated and projected."""
        return self._unpack_output(
            self._with_bidirectional(attended.reshape(mixed.tokens, -1), inputs, masks, state, mixed)
        )

    def _attend_rest(
        self,
        found: dict[int, mx.array],
        queries: mx.array,
        inputs: AttentionInputs,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
    ) -> mx.array:
        """The same, where kernels have computed only some parts."""
        return self._finish(self._attend_parts(found, queries, masks, state, mixed), inputs, masks, state, mixed)

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

    def _write_kv(
        self, inputs: AttentionInputs, state: AppendState, mixed: MixedBatch
    ) -> tuple[mx.array, mx.array | None]:
        """Queries [tokens, heads, size] and the output's gate, once keys and values are written.

        All are written before anything is read: pages can only be written in place while nobody waits to read them.
        """
        if self.kernel_rope is not None:
            projected, sizes = self._project_jointly(inputs, state, mixed)
            rotated = self.kernel_rope(projected, sizes, state, mixed)
            if rotated is not None:
                return self._scale_tokens(rotated, inputs), self._gate(projected, sizes[0], mixed)
        if self.reads_stored_kv:
            return mx.contiguous(self._prepare_queries(inputs, mixed)[:, :, 0]), None
        queries, keys, values, gate = self._prepare_qkv(inputs, mixed)
        state.write(*(part.reshape(mixed.tokens, self._kv_heads, -1) for part in (keys, values)))
        return mx.contiguous(queries[:, :, 0]), gate

    def _project_jointly(
        self, inputs: AttentionInputs, state: AppendState, mixed: MixedBatch
    ) -> tuple[mx.array, tuple[int, int]]:
        """What is projected for a token [tokens, ...], one behind another and without norms of values, and the sizes of
        heads of keys and values."""
        if self.reads_stored_kv:
            project = self[self._spec.projections[0]] if self.joined_qkv is None else self.joined_qkv
            return project(inputs.x.reshape(mixed.tokens, -1)), state.stored.sizes
        if self.joined_qkv is None:
            queries, keys, values = self._project_raw(inputs)
            if self._spec.joint_head_norms:
                queries, keys = self._norm_heads(queries, keys)
            parts = [keys] if self.keys_as_values else [keys, self._scale_values(values)]
            sizes = keys.shape[-1] // self._kv_heads, values.shape[-1] // self._kv_heads
            return mx.concatenate([queries, *parts], axis=-1)[0], sizes
        joint = self._clip(self.joined_qkv(inputs.x.reshape(mixed.tokens, -1)))
        if self._spec.joint_head_norms:
            joint = self._norm_jointly(joint)
        parts_of_head = 1 if self.keys_as_values else 2
        size = joint.shape[-1] // (self._heads * (2 if self._spec.gated else 1) + parts_of_head * self._kv_heads)
        if self._spec.value_scale is not None:
            begin = joint.shape[-1] - self._kv_heads * size
            joint = mx.concatenate([joint[:, :begin], self._scale_values(joint[:, begin:])], axis=-1)
        return joint, (size, size)

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
            return self._attend_tiled(mixed.split_batch_heads(number, queries), *self._read_kv(state), mask)

    def _read_kv(self, state: AppendState) -> tuple[mx.array, mx.array]:
        """The keys and values [rows, heads, tokens, size] that the open batch attends to."""
        return state.keys_and_values()

    def _unpack_output(self, attended: mx.array) -> mx.array:
        """The attention [tokens, ...] of all tokens as it is gated and projected."""
        return attended

    def _gate_output(self, attended: mx.array, gate: mx.array | None, inputs: AttentionInputs) -> mx.array:
        """The attention [..., heads * size] of all tokens, normed and multiplied by its gate if it has these."""
        spec = self._spec
        if spec.output_norm is not None:
            attended = self[spec.output_norm](attended)
        if spec.tiled_heads:
            attended = self._regroup(attended, self._heads // self._kv_heads)
        if gate is not None:
            return attended * mx.sigmoid(gate)
        if spec.gate is None or spec.gate not in self:
            return attended
        raw = self[spec.gate](inputs.x)
        own = mx.sigmoid(raw) if spec.gate_act == "sigmoid" else nn.softplus(raw.astype(mx.float32)).astype(raw.dtype)
        by_gate = attended.reshape(*raw.shape, -1)  # numbers of a head, or a number
        return (by_gate * own[..., None]).reshape(attended.shape)

    def _attend_natively(
        self,
        ragged: RaggedAttention,
        inputs: AttentionInputs,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
    ) -> mx.array:
        gate = None
        if self.reads_stored_kv:
            keys, values = mixed.memo["stored", state]  # the same is written once more
            queries = self._prepare_queries(inputs, mixed).reshape(1, mixed.tokens, -1)
        elif ragged.prepares:
            queries, keys, values = self._project(inputs)
            queries = self._scale_tokens(queries[0], inputs)[None]
        else:
            queries, keys, values, gate = self._prepare_qkv(inputs, mixed)
            if self.kv_layout is not None:
                keys, values = self.kv_layout.pack(keys, values)
            queries, keys, values = (y.reshape(1, mixed.tokens, -1) for y in (queries, keys, values))
        if self._spec.shared_kv is not None and not self._spec.shared_kv.projected:
            mixed.memo["stored", state] = keys, values
        attended = ragged(queries, keys, values, masks, state, mixed)[0]
        if self.kv_layout is not None:
            by_head = attended.reshape(mixed.tokens, self._heads, -1)
            attended = by_head[..., : self.kv_layout.value_size].reshape(mixed.tokens, -1)
        attended = self._with_bidirectional(attended, inputs, masks, state, mixed)
        project: nn.Module = self[self._spec.out]
        return project(self._gate_output(self._unpack_output(attended)[None], gate, inputs))

    def _with_bidirectional(
        self,
        attended: mx.array,
        inputs: AttentionInputs,
        masks: PerBatch | None,
        state: AppendState,
        mixed: MixedBatch,
    ) -> mx.array:
        """The attention [tokens, ...] of all tokens, computed again for those that also see later tokens."""
        window = masks.window if isinstance(masks, BatchMasks) else state.window
        if window is None and self._spec.mutual_in_windows:
            return attended
        for begin, end, own in mixed.bidirectional:
            queries = self._prepare_queries(inputs.taken(slice(begin, end)), own)
            with state.computing(own.parts[0]):
                keys, values = self._read_kv(state)
                mask = state.bidirectional_mask(window)
            seen = self._attend_tiled(own.split_batch_heads(0, queries), keys, values, mask)
            attended[begin:end] = own.join_batch_heads([seen])[0].astype(attended.dtype)
        return attended

    def _project(self, inputs: AttentionInputs) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values [1, tokens, ...]; values as they are stored."""
        queries, keys, values = self._project_raw(inputs)
        return queries, keys, self._finish_values(values)

    def _finish_values(self, values: mx.array) -> mx.array:
        spec = self._spec
        if spec.value_norm is not None:
            by_head = values.reshape(*values.shape[:-1], self._kv_heads, -1)
            values = self[spec.value_norm](by_head).reshape(values.shape)
        return self._scale_values(values)

    def _scale_values(self, values: mx.array) -> mx.array:
        name = self._spec.value_scale
        factor = None if name is None else attrgetter(name)(self)
        return values if factor is None else values * factor

    def _project_raw(self, inputs: AttentionInputs) -> tuple[mx.array, mx.array, mx.array]:
        spec, x = self._spec, inputs.x
        if inputs.raw is not None:
            return inputs.raw
        if spec.joint is None:
            keys, values = self._project_kv(x) if inputs.projected is None else inputs.projected
            queries = self[spec.projections[0]](x)
            return self._regroup(queries, self._kv_heads) if spec.tiled_heads else queries, keys, values
        joint = self._clip(self[spec.joint](x))
        if spec.joint_by_group:
            groups = joint.reshape(*x.shape[:2], self._kv_heads, self._heads // self._kv_heads + 2, -1)
            return groups[..., :-2, :].flatten(2), groups[..., -2, :].flatten(2), groups[..., -1, :].flatten(2)
        size = joint.shape[-1] // (self._heads + 2 * self._kv_heads)
        queries, keys, values = mx.split(joint, [self._heads * size, (self._heads + self._kv_heads) * size], axis=-1)
        return queries, keys, values

    def _clip(self, joint: mx.array) -> mx.array:
        if self._spec.clip is None:
            return joint
        most = attrgetter(self._spec.clip)(self)
        return mx.clip(joint, -most, most)

    def _regroup(self, by_head: mx.array, groups: int) -> mx.array:
        """Heads [..., heads * size] so that each of them stands next to what was so many behind it."""
        apart = by_head.reshape(*by_head.shape[:-1], -1, groups, by_head.shape[-1] // self._heads)
        return apart.swapaxes(-2, -3).flatten(-3)

    def _project_kv(self, x: mx.array) -> tuple[mx.array, mx.array]:
        _, of_keys, of_values = self._spec.projections
        keys = self[of_keys](x)
        return keys, self[of_values](x) if of_values in self else keys

    def _prepare_queries(self, inputs: AttentionInputs, mixed: MixedBatch) -> mx.array:
        """Queries [tokens, heads, 1, size], rotated to their positions."""
        if not self.reads_stored_kv:
            return self._prepare_qkv(inputs, mixed)[0]
        queries = self[self._spec.projections[0]](inputs.x).reshape(mixed.tokens, self._heads, 1, -1)
        if self._spec.norms is not None:
            queries = self[self._spec.norms[0]](queries)
        return queries if self._rope is None else self._rotate_each(queries, mixed)

    def _prepare_qkv(
        self, inputs: AttentionInputs, mixed: MixedBatch
    ) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
        """Queries, keys and values [tokens, heads, 1, size], rotated to their positions, and the output's gate.

        Each token is a row of its own, so that one RoPE rotates all of them.
        """
        spec, gate = self._spec, None
        queries, keys, values = self._project(inputs)
        if spec.joint_head_norms:
            queries, keys = self._norm_heads(queries, keys)
        queries = queries.reshape(mixed.tokens, self._heads, 1, -1)
        keys, values = (y.reshape(mixed.tokens, self._kv_heads, 1, -1) for y in (keys, values))
        if spec.gated:
            queries, gate = mx.split(queries, 2, axis=-1)
            gate = gate.reshape(mixed.tokens, -1)
        if spec.norms_behind_rope:
            queries, keys = self._norm_heads(*self._rotate(queries, keys, mixed))
        else:
            if not spec.joint_head_norms:  # some have a weight for each head, which stand next to a head's values
                queries, keys = (y[:, :, None] for y in self._norm_heads(queries[:, :, 0], keys[:, :, 0]))
            queries, keys = self._rotate(queries, keys, mixed)
        if spec.query_scale is not None and isinstance(scale := attrgetter(spec.query_scale)(self), mx.array):
            queries = queries * scale.astype(queries.dtype)[:, None, None]
        return self._scale_tokens(queries, inputs), keys, values, gate

    def _scale_tokens(self, queries: mx.array, inputs: AttentionInputs) -> mx.array:
        """Queries [tokens, ...], each token's multiplied by its own factor."""
        if inputs.token_scale is None:
            return queries
        scaled = queries * inputs.token_scale.reshape(-1, *[1] * (queries.ndim - 1))
        return scaled.astype(queries.dtype)

    def _rotate(self, queries: mx.array, keys: mx.array, mixed: MixedBatch) -> tuple[mx.array, mx.array]:
        if self._rope is None:
            return queries, keys
        if self._shared_rope is not None and queries.dtype == keys.dtype == mx.float32:
            return self._shared_rope(queries, keys, mixed)
        return self._rotate_each(queries, mixed), self._rotate_each(keys, mixed)

    def _rotate_each(self, x: mx.array, mixed: MixedBatch) -> mx.array:
        assert self._rope is not None
        if self._tile is None:  # RoPE is fused
            return rotate_parts(self._rope, x, mixed)
        offset = TokenPositions(mixed.positions[..., None]) if mixed.three_axes else mixed.positions
        return self._rope(x, offset=offset)

    def _norm_heads(self, queries: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
        if self._plain_norm is not None:
            queries, keys = self._plain_norm(queries), self._plain_norm(keys)
            if self._spec.norm_weights is None:
                return queries, keys
            of_queries, of_keys = self._spec.norm_weights
            return queries * self[of_queries], keys * self[of_keys]
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
            return attend_capped(queries, keys, values, mask, scale=self._scale, cap=self._cap)
        exact = queries.astype(mx.float32) if self._spec.in_float32 else queries
        attended = mx.fast.scaled_dot_product_attention(
            exact, keys, values, scale=self._scale, mask=mask, sinks=self._sinks
        )
        return attended.astype(queries.dtype) if self._spec.in_float32 else attended

    @property
    def _sinks(self) -> mx.array | None:
        return None if self._spec.sinks is None else self.get(self._spec.sinks)


def _page_choice_batch(mixed: MixedBatch) -> MixedBatch:
    """The tokens whose queries choose the pages that a batch sees: the same for all layers."""
    if "page choice" not in mixed.memo:
        [part] = mixed.parts
        mixed.memo["page choice"] = MixedBatch((part.every(QUERY_STRIDE),))
    batch: MixedBatch = mixed.memo["page choice"]
    return batch
