"""Recurrent mixers that have no kernels, by MLX's operations, on every device: Mamba 1's scan, PLaMo 2's, lightning
attention and gated linear units.

Projections are computed for all tokens of a pass at once, the recurrence for all rows with as many tokens. Prompts take
a number of operations that grows with their blocks, not with their tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.forward_batch import ForwardBatch, MixedBatch, TokenSpan
from ingot.cache.layer_state import RecurrentState
from ingot.models.families.description import (
    GatedConvSpec,
    LightningSpec,
    LinearUnitSpec,
    PlamoScanSpec,
    SelectiveScanSpec,
)
from ingot.models.families.registry import recurrence_spec_of
from ingot.models.layers.modules import extend

BLOCK = 16
"""Tokens whose states exist at once."""
RowsFunction = Callable[..., tuple[mx.array, list[mx.array]]]
"""From what rows [rows, width, ...] are given, their states [rows, ...] and where they begin [rows] to what comes out
and the states after it."""


class ScanMixer(nn.Module):
    """Computes what the recurrent mixer that it extends computes."""

    _spec: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        state = next((value for value in values if isinstance(value, RecurrentState)), None)
        if state is None:
            return super().__call__(*args, **kwargs)
        return self._mix(values[0], state, kwargs)

    def _mix(self, x: mx.array, state: RecurrentState, options: dict[str, Any]) -> mx.array:
        raise NotImplementedError


class SelectiveScan(ScanMixer):
    """Mamba 1's: each number of a state has a decay of its own."""

    def _mix(self, x: mx.array, state: RecurrentState, options: dict[str, Any]) -> mx.array:
        spec: SelectiveScanSpec = self._spec
        size, rank, channels = self.ssm_state_size, self.time_step_rank, self.intermediate_size
        inner, gate = mx.split(self.in_proj(x.reshape(-1, x.shape[-1])), 2, axis=-1)
        shapes = (self.conv_kernel_size - 1, channels), (channels, size)
        tails, states = state.in_place(*shapes)
        inner, [tails] = over_rows(state, [inner], [tails], self._convolve)
        steps, keys, queries = mx.split(self.x_proj(inner), [rank, rank + size], axis=-1)
        if spec.norms is not None:
            steps, keys, queries = (
                self[name](each) for name, each in zip(spec.norms, (steps, keys, queries), strict=True)
            )
        elif spec.eps is not None and attrgetter(spec.normed)(self):
            eps = attrgetter(spec.eps)(self)
            steps, keys, queries = (mx.fast.rms_norm(each, None, eps) for each in (steps, keys, queries))
        steps = nn.softplus(self.dt_proj(steps))
        decay = -mx.exp(self.A_log.astype(mx.float32))

        def scan(u: mx.array, step: mx.array, key: mx.array, query: mx.array, h: mx.array, _: mx.array) -> Any:
            def terms(begin: int, end: int) -> tuple[mx.array, mx.array]:
                own = step[:, begin:end, :, None]
                return mx.exp(own * decay), own * u[:, begin:end, :, None] * key[:, begin:end, None, :]

            def read(begin: int, end: int, hs: mx.array) -> mx.array:
                return (hs * query[:, begin:end, None]).sum(axis=-1)

            y, h = scan_in_blocks(u.shape[1], terms, read, h)
            return y, [h]

        wide = [each.astype(mx.float32) for each in (inner, steps, keys, queries)]
        y, [states] = over_rows(state, wide, [states], scan)
        state.put_rows([tails, states])
        y = (y + self.D * wide[0]) * nn.silu(gate.astype(mx.float32))
        return self.out_proj(y.astype(x.dtype)).reshape(x.shape)

    def _convolve(self, x: mx.array, tail: mx.array, _: mx.array) -> tuple[mx.array, list[mx.array]]:
        return convolve(x, tail, self.conv1d)


class PlamoScan(ScanMixer):
    """PLaMo 2's: Mamba 2's scan of what a convolution gives."""

    def _mix(self, x: mx.array, state: RecurrentState, options: dict[str, Any]) -> mx.array:
        heads, size, eps = self.num_heads, self.hidden_size_per_head, self.config.rms_norm_eps
        joint = self.in_proj(x.reshape(-1, x.shape[-1])).reshape(-1, heads, 2 * size)
        gate, inner = (each.flatten(1) for each in mx.split(joint, 2, axis=-1))
        shapes = (self.conv_kernel_size - 1, heads * size), (heads, size, self.d_state)
        tails, states = state.in_place(*shapes)
        inner, [tails] = over_rows(state, [inner], [tails], lambda own, tail, _: convolve(own, tail, self.conv1d))
        keys, queries, steps = mx.split(self.bcdt_proj(inner), [self.d_state, 2 * self.d_state], axis=-1)
        steps = self.dt_proj(mx.fast.rms_norm(steps, self.dt_norm_weight, eps))
        keys, queries = (
            mx.fast.rms_norm(keys, self.B_norm_weight, eps),
            mx.fast.rms_norm(queries, self.C_norm_weight, eps),
        )
        update = upstream_function(self, "ssm_update")

        def scan(u: mx.array, key: mx.array, query: mx.array, step: mx.array, h: mx.array, _: mx.array) -> Any:
            by_head = u.reshape(*u.shape[:2], heads, size)
            own = key[:, :, None], query[:, :, None]
            y, h = update(by_head, self.A_log, *own, self.D, step, self.dt_bias, h.astype(u.dtype))
            return y.flatten(2), [h]

        y, [states] = over_rows(state, [inner, keys, queries, steps], [states], scan)
        state.put_rows([tails, states])
        return self.out_proj((y * nn.silu(gate)).astype(x.dtype)).reshape(x.shape)


class LightningAttention(ScanMixer):
    """Linear attention whose heads each have one decay."""

    def _mix(self, x: mx.array, state: RecurrentState, options: dict[str, Any]) -> mx.array:
        heads, size = self.num_attention_heads, self.head_dim
        joint = self.query_key_value(x).reshape(*x.shape[:2], 3 * heads, size)
        queries, keys, values = (each.swapaxes(1, 2) for each in mx.split(joint, 3, axis=2))
        if self.use_qk_norm:
            queries, keys = self.query_layernorm(queries), self.key_layernorm(keys)
        queries, keys = (self.rope(each, offset=options["offset"]) for each in (queries, keys))
        attend = upstream_function(self, "recurrent_gla")

        def scan(q: mx.array, k: mx.array, v: mx.array, h: mx.array, _: mx.array) -> Any:
            by_head = {name: each.swapaxes(1, 2) for name, each in (("q", q), ("k", k), ("v", v))}
            y, h = attend(**by_head, g=self._slope, scale=self.scale, h=h)
            return y.swapaxes(1, 2).flatten(2), [h]

        flat = [each.swapaxes(1, 2).reshape(-1, heads, size) for each in (queries, keys, values)]
        y, after = over_rows(state, flat, state.in_place((heads, size, size)), scan)
        state.put_rows(after)
        y = self.g_norm(y.astype(x.dtype).reshape(*x.shape[:2], -1)) * mx.sigmoid(self.g_proj(x))
        return self.dense(y)


class GatedLinearUnits(ScanMixer):
    """Griffin's RG-LRU: each channel of a convolution has a decay that depends on it."""

    def _mix(self, x: mx.array, state: RecurrentState, options: dict[str, Any]) -> mx.array:
        flat, unit = x.reshape(-1, x.shape[-1]), self.rg_lru
        tails, states = state.in_place((self.conv1d_temporal_width - 1, self.lru_width), (self.lru_width,))
        inner, [tails] = over_rows(state, [self.linear_x(flat)], [tails], self._convolve)
        u = inner.astype(mx.float32)

        def gate(weight: mx.array, bias: mx.array) -> mx.array:
            by_head = u.reshape(-1, unit.num_heads, unit.head_dim).swapaxes(0, 1)
            return mx.sigmoid((by_head @ weight).swapaxes(0, 1) + bias).flatten(1)

        decays = -8.0 * gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias) * nn.softplus(unit.recurrent_param)
        gated = u * gate(unit.input_gate_weight, unit.input_gate_bias)

        def scan(given: mx.array, log: mx.array, h: mx.array, begins: mx.array) -> Any:
            first = begins[:, None, None] & (mx.arange(given.shape[1]) == 0)[:, None]
            scaled = given * mx.where(first, 1.0, mx.sqrt(1 - mx.exp(2 * log)))

            def terms(begin: int, end: int) -> tuple[mx.array, mx.array]:
                return mx.exp(log[:, begin:end]), scaled[:, begin:end]

            y, h = scan_in_blocks(given.shape[1], terms, lambda begin, end, hs: hs, h)
            return y, [h]

        y, [states] = over_rows(state, [gated, decays], [states], scan)
        state.put_rows([tails, states])
        return self.linear_out(y.astype(x.dtype) * nn.gelu_approx(self.linear_y(flat))).reshape(x.shape)

    def _convolve(self, x: mx.array, tail: mx.array, _: mx.array) -> tuple[mx.array, list[mx.array]]:
        y, after = self.conv_1d(x, cache=tail.astype(x.dtype))
        return y, [after]


class GatedConvolutions(ScanMixer):
    """Values gated by queries and keys, where keys and values come from convolutions, as in GEAR."""

    def _mix(self, x: mx.array, state: RecurrentState, options: dict[str, Any]) -> mx.array:
        flat, sharing = x.reshape(-1, x.shape[-1]), self.num_key_value_groups
        queries, keys = (
            norm(project(flat).reshape(len(flat), -1, self.head_dim))
            for norm, project in ((self.q_norm, self.q_proj), (self.k_norm, self.k_proj))
        )
        tails = state.in_place(*[(self.L_cache - 1, self.kv_dim)] * 2)

        def convolved(key: mx.array, value: mx.array, k: mx.array, v: mx.array, _: mx.array) -> Any:
            pairs = (key, k, self.key_conv), (value, v, self.value_conv)
            joined = [mx.concatenate([tail.astype(own.dtype), own], axis=1) for own, tail, _ in pairs]
            made = [convolution(own) for own, (_, _, convolution) in zip(joined, pairs, strict=True)]
            return mx.concatenate(made, axis=-1), [own[:, own.shape[1] - k.shape[1] :] for own in joined]

        y, after = over_rows(state, [keys.flatten(1), self.v_proj(flat)], tails, convolved)
        state.put_rows(after)
        keys, values = (
            mx.repeat(each.reshape(len(flat), -1, self.head_dim), sharing, axis=1) for each in mx.split(y, 2, axis=-1)
        )
        return self.o_proj((mx.sigmoid(queries * keys) * values).flatten(1)).reshape(x.shape)


_MIXERS: dict[type, type[ScanMixer]] = {
    SelectiveScanSpec: SelectiveScan,
    PlamoScanSpec: PlamoScan,
    LightningSpec: LightningAttention,
    LinearUnitSpec: GatedLinearUnits,
    GatedConvSpec: GatedConvolutions,
}


def scan_mixer_of(module: nn.Module) -> ScanMixer | None:
    """None for other modules."""
    spec = recurrence_spec_of(module)
    kind = _MIXERS.get(type(spec))
    if kind is None:
        return None
    replacement: ScanMixer = extend(module, kind, "Scanning")
    replacement._spec = spec
    return replacement


def upstream_function(module: nn.Module, name: str) -> Any:
    """A function of the module that the class of a swapped mixer is defined in."""
    own = next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("ingot."))
    return getattr(sys.modules[own.__module__], name)


def convolve(x: mx.array, tail: mx.array, convolution: nn.Module) -> tuple[mx.array, list[mx.array]]:
    """The activated convolution of rows [rows, width, channels] behind their tails, and the tails after it."""
    joined = mx.concatenate([tail.astype(x.dtype), x], axis=1)
    return nn.silu(convolution(joined)), [joined[:, joined.shape[1] - tail.shape[1] :]]


class _RowGroup(NamedTuple):
    """The rows of a pass that have as many tokens."""

    width: int
    tokens: mx.array | None
    """Their tokens; None: all, in order."""
    slots: slice | mx.array
    begins: mx.array
    any_begins: bool


class _RowGroups(NamedTuple):
    groups: Sequence[_RowGroup]
    tokens: mx.array | None
    """Where each token of the pass is behind the groups' own; None: there already."""
    rows: mx.array | None


def _row_groups(opened: ForwardBatch | MixedBatch) -> _RowGroups:
    """The same for all layers of a pass."""
    key = ("runs", "by width")
    if key not in opened.memo:
        opened.memo[key] = _group_rows(opened.pieces)
    groups: _RowGroups = opened.memo[key]
    return groups


def _group_rows(pieces: Sequence[TokenSpan]) -> _RowGroups:
    widths: dict[int, list[int]] = {}
    for number, (_, width, _, _) in enumerate(pieces):
        widths.setdefault(width, []).append(number)
    groups, order, rows = list[_RowGroup](), list[int](), list[int]()
    for width, numbers in widths.items():
        own = [pieces[number] for number in numbers]
        tokens = [begin + each for begin, _, _, _ in own for each in range(width)]
        begins, slots = [start == 0 for _, _, _, start in own], [slot for _, _, slot, _ in own]
        together = slots == list(range(slots[0], slots[0] + len(slots)))
        whole = len(widths) == 1 and tokens == list(range(len(tokens)))
        groups.append(
            _RowGroup(
                width,
                None if whole else mx.array(tokens),
                slice(slots[0], slots[0] + len(slots)) if together else mx.array(slots),
                mx.array(begins),
                any(begins),
            )
        )
        order += tokens
        rows += numbers
    return _RowGroups(groups, _inverse(order), _inverse(rows))


def _inverse(order: Sequence[int]) -> mx.array | None:
    if order == list(range(len(order))):
        return None
    return mx.array(sorted(range(len(order)), key=order.__getitem__))


def over_rows(
    state: RecurrentState, inputs: Sequence[mx.array], states: Sequence[mx.array], compute: RowsFunction
) -> tuple[mx.array, list[mx.array]]:
    """What `compute` gives of tokens [tokens, ...] and of their rows' states, for rows of each width at once:
    [tokens, ...], and the states after it of all rows, in their order. States of rows that begin are zeros."""
    found, outputs, after = _row_groups(state.opened), list[mx.array](), list[list[mx.array]]()
    for group in found.groups:
        before = [each[group.slots] for each in states]
        if group.any_begins:
            before = [_zeros_where(group.begins, each) for each in before]
        given = [each if group.tokens is None else each[group.tokens] for each in inputs]
        by_row = [each.reshape(len(group.begins), group.width, *each.shape[1:]) for each in given]
        y, new = compute(*by_row, *before, group.begins)
        outputs.append(y.flatten(0, 1))
        after.append(new)
    if len(found.groups) == 1:
        y, joined = outputs[0], after[0]
    else:
        y, joined = mx.concatenate(outputs), [mx.concatenate(list(each)) for each in zip(*after, strict=True)]
    y = y if found.tokens is None else y[found.tokens]
    return y, joined if found.rows is None else [each[found.rows] for each in joined]


def _zeros_where(rows: mx.array, states: mx.array) -> mx.array:
    return mx.where(rows.reshape(-1, *[1] * (states.ndim - 1)), mx.zeros((), states.dtype), states)


def scan_in_blocks(
    width: int,
    terms: Callable[[int, int], tuple[mx.array, mx.array]],
    read: Callable[[int, int, mx.array], mx.array],
    h: mx.array,
) -> tuple[mx.array, mx.array]:
    """What is read of the states h = a * h + b after each of so many tokens, and the last state. `terms` are a and b
    [rows, tokens, ...] of some tokens."""
    outputs = []
    for begin in range(0, width, BLOCK):
        end = min(begin + BLOCK, width)
        a, b = terms(begin, end)
        reach = 1
        while reach < end - begin:  # each token's a and b of all tokens up to it, twice as many every time
            b = mx.concatenate([b[:, :reach], b[:, reach:] + a[:, reach:] * b[:, :-reach]], axis=1)
            a = mx.concatenate([a[:, :reach], a[:, reach:] * a[:, :-reach]], axis=1)
            reach *= 2
        hs = b + a * h[:, None]
        outputs.append(read(begin, end, hs))
        h = hs[:, -1]
    return (outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)), h
