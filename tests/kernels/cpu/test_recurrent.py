"""Recurrent layers as one operation, against float64 and against the models' own modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from tests.memory import settled

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

BOUND = 2e-5  # of the largest value
SLOTS = 4
Row = np.ndarray


def _draw(dice: np.random.Generator, *shape: int) -> np.ndarray:
    return dice.standard_normal(shape).astype(np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _filtered(x: Row, before: Row, weight: np.ndarray, bias: np.ndarray | None) -> tuple[Row, Row]:
    """Each channel's causal filter over x [tokens, channels], and the tail that the next tokens need."""
    taps = weight.shape[1]
    rows = np.concatenate([before, x])
    out = sum(rows[tap : tap + len(x)] * weight[:, tap] for tap in range(taps))
    return out if bias is None else out + bias, rows[len(rows) - taps + 1 :]


class Convolved:
    """A convolution: its operation, and the same in float64 for one sequence."""

    def __init__(self, dice: np.random.Generator, channels: int, taps: int, silu: bool, gated: bool) -> None:
        self.weight, self.bias = _draw(dice, channels, taps), _draw(dice, channels)
        self.silu, self.gated, self.channels = silu, gated, channels
        self.widths = (3 * channels if gated else channels,)
        self.rows: tuple[tuple[int, ...], ...] = ((taps - 1, channels),)
        self.layer = self.operation = native.short_convolution(
            mx.array(self.weight)[..., None], mx.array(self.bias), silu=silu, gated=gated
        )
        self.inputs: tuple[int, ...] = (0,)

    def __call__(self, given: Sequence[Row], states: list[Row]) -> tuple[Row, list[Row]]:
        (x,) = given
        if self.gated:
            b, c, x = np.split(x, 3, axis=-1)
            x = b * x
        y, tail = _filtered(x, states[0], self.weight, self.bias)
        y = y * _sigmoid(y) if self.silu else y
        return (c * y if self.gated else y), [tail]


@dataclass(frozen=True)
class Rule:
    """What gated delta nets differ in."""

    joined: bool = False  # inputs are side by side
    by_key: bool = False
    bound: float | None = None
    most: float = 1.0
    sigmoid: bool = False


class Delta:
    """A gated delta layer, with its inputs apart or side by side."""

    def __init__(self, dice: np.random.Generator, heads: int, group: int, key: int, value: int, rule: Rule) -> None:
        self.heads, self.group, self.key, self.value, self.rule = heads, group, key, value, rule
        values, decays = heads * group, key if rule.by_key else 1
        channels = 2 * heads * key + values * value
        self.weight = _draw(dice, channels, 4)
        self.a_log, self.dt_bias = _draw(dice, values), _draw(dice, values * decays)
        self.norm = 1 + _draw(dice, value) / 4
        all_values, both = group * value, 2 * (key + group * value)
        if rule.joined:
            self.widths: tuple[int, ...] = (heads * both, heads * 2 * group)
            columns = {
                "q": (0, 0, both),
                "k": (key, 0, both),
                "v": (2 * key, value, both),
                "z": (2 * key + all_values, value, both),
                "b": (0, 1, 2 * group),
                "a": (group, 1, 2 * group),
            }
        else:
            self.widths = (heads * key, heads * key, values * value, values * value, values, values * decays)
            columns = {
                "q": (0, 0, key),
                "k": (0, 0, key),
                "v": (0, value, all_values),
                "z": (0, value, all_values),
                "b": (0, 1, group),
                "a": (0, decays, group * decays),
            }
        self.rows = ((3, channels), (values, value, key))
        made = native.gated_delta_layer(
            key_heads=heads,
            value_heads=values,
            key_size=key,
            value_size=value,
            eps=1e-5,
            columns=columns,
            filter=mx.array(self.weight)[..., None],
            a_log=mx.array(self.a_log),
            dt_bias=mx.array(self.dt_bias),
            norm=mx.array(self.norm),
            decays_by_key=rule.by_key,
            bound=rule.bound,
            most_strength=rule.most,
            sigmoid_gate=rule.sigmoid,
        )
        self.layer, self.inputs = made, (0, 0, 0, 0, 1, 1) if rule.joined else tuple(range(6))

    def operation(self, *given: Any, **named: Any) -> Any:
        count = len(self.widths)
        return self.layer(*(given[index] for index in self.inputs), *given[count:], **named)

    def _apart(self, given: Sequence[Row]) -> list[Row]:
        if not self.rule.joined:
            return [np.concatenate(given[:3], axis=-1), *given[3:]]
        count, group, key, value = len(given[0]), self.group, self.key, self.value
        wide = given[0].reshape(count, self.heads, -1)
        q, k, v, z = np.split(wide, [key, 2 * key, 2 * key + group * value], axis=-1)
        b, a = np.split(given[1].reshape(count, self.heads, -1), 2, axis=-1)
        q, k, v, z, b, a = (part.reshape(count, -1) for part in (q, k, v, z, b, a))
        return [np.concatenate([q, k, v], axis=-1), z, b, a]

    def _decays(self, a: Row) -> Row:
        """[tokens, heads, 1 or key size, of a state's rows]."""
        raw = (a + self.dt_bias).reshape(len(a), self.heads * self.group, -1)
        rates = np.exp(self.a_log.astype(np.float64))[:, None]
        if self.rule.bound is not None:
            return np.exp(self.rule.bound * _sigmoid(rates * raw))
        return np.asarray(np.exp(-rates * np.logaddexp(raw, 0)))

    def __call__(self, given: Sequence[Row], states: list[Row]) -> tuple[Row, list[Row]]:
        qkv, z, b, a = self._apart(given)
        qkv, tail = _filtered(qkv, states[0], self.weight.astype(np.float64), None)
        qkv = qkv * _sigmoid(qkv)
        all_keys, count = self.heads * self.key, len(qkv)
        q, k, v = np.split(qkv, [all_keys, 2 * all_keys], axis=-1)
        q, k = (_unit(x.reshape(count, self.heads, self.key)).repeat(self.group, axis=1) for x in (q, k))
        q, v = q * self.key**-0.5, v.reshape(count, -1, self.value)
        decay, beta, state, out = self._decays(a), self.rule.most * _sigmoid(b), states[1].copy(), np.empty_like(v)
        for t in range(count):
            state *= decay[t][:, None]
            error = (v[t] - np.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
            state += error[:, :, None] * k[t][:, None, :]
            out[t] = np.einsum("hvk,hk->hv", state, q[t])
        out = out / np.sqrt((out**2).mean(axis=-1, keepdims=True) + 1e-5) * self.norm
        gate = _sigmoid(z) if self.rule.sigmoid else z * _sigmoid(z)
        return out.reshape(count, -1) * gate, [tail, state]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)


@dataclass(frozen=True)
class Norm:
    parts: int  # 0: none
    first: bool


class Scanned:
    """A mixer of Mamba 2's kind."""

    def __init__(
        self, dice: np.random.Generator, groups: int, heads: int, size: int, state: int, norm: Norm, bias: bool
    ) -> None:
        self.groups, self.heads, self.size, self.state, self.norm = groups, groups * heads, size, state, norm
        self.inner = self.heads * size
        channels = self.inner + 2 * groups * state
        self.weight, self.bias = _draw(dice, channels, 3), _draw(dice, channels) if bias else None
        self.a_log, self.dt_bias, self.skip = (_draw(dice, self.heads) for _ in range(3))
        self.scale = 1 + _draw(dice, self.inner) / 4
        self.widths = (self.inner + channels + self.heads,)
        self.rows = ((2, channels), (self.heads, size, state))
        self.inputs = (0,)
        self.layer = self.operation = native.mamba_scan(
            heads=self.heads,
            groups=groups,
            head_size=size,
            state_size=state,
            dt_limit=(0.01, 2.0),
            filter=mx.array(self.weight)[..., None],
            filter_bias=None if self.bias is None else mx.array(self.bias),
            a_log=mx.array(self.a_log),
            dt_bias=mx.array(self.dt_bias),
            skip=mx.array(self.skip),
            norm=mx.array(self.scale) if norm.parts else None,
            eps=1e-5,
            norm_size=self.inner // norm.parts if norm.parts else 0,
            norm_first=norm.first,
        )

    def __call__(self, given: Sequence[Row], states: list[Row]) -> tuple[Row, list[Row]]:
        gate, x, dt = np.split(given[0], [self.inner, given[0].shape[-1] - self.heads], axis=-1)
        x, tail = _filtered(x, states[0], self.weight.astype(np.float64), self.bias)
        x, count = x * _sigmoid(x), len(x)
        x, b, c = np.split(x, [self.inner, self.inner + self.groups * self.state], axis=-1)
        x = x.reshape(count, self.heads, self.size)
        b, c = (y.reshape(count, self.groups, -1).repeat(self.heads // self.groups, axis=1) for y in (b, c))
        dt = np.clip(np.logaddexp(dt + self.dt_bias, 0), 0.01, 2.0)
        decay, state, out = np.exp(-np.exp(self.a_log.astype(np.float64)) * dt), states[1].copy(), np.empty_like(x)
        for t in range(count):
            state = state * decay[t][:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
            out[t] = np.einsum("hds,hs->hd", state, c[t]) + self.skip[:, None] * x[t]
        y, gate = out.reshape(count, -1), gate * _sigmoid(gate)
        return (self._normed(y) * gate if self.norm.first else self._normed(y * gate)), [tail, state]

    def _normed(self, y: Row) -> Row:
        if not self.norm.parts:
            return y
        parts = y.reshape(len(y), self.norm.parts, -1)
        return (parts / np.sqrt((parts**2).mean(axis=-1, keepdims=True) + 1e-5)).reshape(len(y), -1) * self.scale


Layer = Convolved | Delta | Scanned
KIMI = Rule(by_key=True, sigmoid=True)
BOUNDED = Rule(by_key=True, bound=-5.0, sigmoid=True)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    dice = np.random.default_rng(draw(st.integers(0, 99)))
    small, sizes = st.integers(1, 3), st.sampled_from([1, 3, 8, 20, 32, 33])
    match draw(st.sampled_from(["convolution", "delta", "scan"])):
        case "convolution":
            return Convolved(
                dice, draw(st.integers(1, 300)), draw(st.integers(2, 5)), draw(st.booleans()), draw(st.booleans())
            )
        case "delta":
            rule = draw(st.sampled_from([Rule(), Rule(joined=True), KIMI, BOUNDED, Rule(most=2.0)]))
            return Delta(dice, draw(small), draw(small), draw(sizes), draw(sizes), rule)
        case _:
            norm = Norm(draw(st.integers(0, 1)), draw(st.booleans()))
            return Scanned(dice, draw(small), draw(small), draw(sizes), draw(sizes), norm, draw(st.booleans()))


def _empty(layer: Layer) -> list[mx.array]:
    """Live states of slots that held other sequences before."""
    return [mx.random.normal((SLOTS, *row)) for row in layer.rows]


def _run(layer: Layer, given: Sequence[Row], states: list[mx.array], pieces: list[Any]) -> tuple[Row, list[mx.array]]:
    y, *states = layer.operation(*(mx.array(x) for x in given), *states, pieces)
    mx.eval(y, states)
    return np.array(y), states


def _close(value: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(value - expected).max(initial=0) <= BOUND * max(np.abs(expected).max(initial=0), 1))


@given(layer=layers(), data=st.data())
def test_any_mix_of_prompts_and_steps_gives_what_each_sequence_gives_alone(layer: Layer, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=SLOTS))
    dice = np.random.default_rng(len(lengths))
    texts = [[_draw(dice, length, width) for width in layer.widths] for length in lengths]
    states, done = _empty(layer), [0] * len(texts)
    outputs: list[list[Row]] = [[] for _ in texts]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        pieces, rows, first = [], [], 0
        for slot, (at, length) in enumerate(zip(done, lengths, strict=True)):
            count = data.draw(st.integers(0, length - at))
            count = count or (1 if at < length and not rows else 0)
            if count:
                pieces.append((first, count, slot, at))
                rows.append([x[at : at + count] for x in texts[slot]])
                first += count
        y, states = _run(layer, [np.concatenate(parts) for parts in zip(*rows, strict=True)], states, pieces)
        for begin, count, slot, at in pieces:
            outputs[slot].append(y[begin : begin + count])
            done[slot] = at + count
    for slot, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        expected, kept = layer([x.astype(np.float64) for x in text], [np.zeros(row) for row in layer.rows])
        assert _close(np.concatenate(output), expected)
        assert all(_close(np.array(own)[slot], part) for own, part in zip(states, kept, strict=True))


@settings(max_examples=20, deadline=None)
@given(layer=layers(), cut=st.integers(1, 69))
def test_a_prompt_cut_in_two_is_the_same_to_the_last_bit(layer: Layer, cut: int) -> None:
    dice = np.random.default_rng(cut)
    text = [_draw(dice, 70, width) for width in layer.widths]
    whole, states = _run(layer, text, _empty(layer), [(0, 70, 2, 0)])
    first, halves = _run(layer, [x[:cut] for x in text], _empty(layer), [(0, cut, 2, 0)])
    second, halves = _run(layer, [x[cut:] for x in text], halves, [(0, 70 - cut, 2, cut)])
    assert np.array_equal(np.concatenate([first, second]), whole)
    assert all(np.array_equal(np.array(a)[2], np.array(b)[2]) for a, b in zip(states, halves, strict=True))


@settings(max_examples=20, deadline=None)
@given(layer=layers(), others=st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_a_row_does_not_depend_on_the_others_and_leaves_their_slots_alone(layer: Layer, others: list[int]) -> None:
    dice = np.random.default_rng(len(others))
    own = [_draw(dice, 40, width) for width in layer.widths]
    before = _empty(layer)
    copies = [np.array(state) for state in before]
    alone, states = _run(layer, own, before, [(0, 40, 1, 0)])
    for state, copy in zip(states, copies, strict=True):
        assert np.array_equal(np.delete(np.array(state), 1, 0), np.delete(copy, 1, 0))
    # Padded to the same width, as prompts are that do not share one row.
    padded = [np.concatenate([x, *(_draw(dice, 40, x.shape[1]) for _ in others)]) for x in own]
    slots = [1, 0, 2, 3][: 1 + len(others)]
    pieces = [(40 * i, count, slots[i], 0) for i, count in enumerate([40, *others])]
    among, _ = _run(layer, padded, _empty(layer), pieces)
    assert np.array_equal(among[:40], alone)
    for i, count in enumerate(others, start=1):
        assert not among[40 * i + count : 40 * (i + 1)].any()


@settings(max_examples=20, deadline=None)
@given(layer=layers(), earlier=st.integers(1, 4), counts=st.lists(st.integers(1, 6), min_size=1, max_size=SLOTS))
def test_earlier_states_are_those_that_fewer_tokens_leave(layer: Layer, earlier: int, counts: list[int]) -> None:
    dice = np.random.default_rng(earlier)
    known = [40 if slot % 2 else 0 for slot in range(len(counts))]
    texts = [[_draw(dice, 40 + count, width) for width in layer.widths] for count in counts]
    states = _empty(layer)
    for slot, text in enumerate(texts):
        if known[slot]:
            _, states = _run(layer, [x[:40] for x in text], states, [(0, 40, slot, 0)])
    firsts = [sum(counts[:slot]) for slot in range(len(counts))]
    pieces = [(firsts[slot], count, slot, known[slot]) for slot, count in enumerate(counts)]
    rows = [[x[known[slot] :][: counts[slot]] for x in text] for slot, text in enumerate(texts)]
    given = [mx.array(np.concatenate(parts)) for parts in zip(*rows, strict=True)]
    found = layer.operation(*given, *(mx.array(np.array(state)) for state in states), pieces, earlier=earlier)
    y, *after = (np.array(array) for array in found)
    plain, kept = _run(layer, [np.array(x) for x in given], [mx.array(np.array(state)) for state in states], pieces)
    assert np.array_equal(y, plain)
    assert all(np.array_equal(one, np.array(two)) for one, two in zip(after, kept, strict=False))
    for slot, without in ((slot, without) for slot in range(len(counts)) for without in range(1, earlier + 1)):
        total = known[slot] + counts[slot] - without
        expected = [np.zeros(row) for row in layer.rows]
        if counts[slot] >= without and total > 0:
            _, fewer = _run(layer, [x[:total] for x in texts[slot]], _empty(layer), [(0, total, slot, 0)])
            expected = [np.array(state)[slot] for state in fewer]
        taken = [part[without - 1, slot] for part in after[len(layer.rows) :]]
        assert all(np.array_equal(one, two) for one, two in zip(taken, expected, strict=True))


@settings(max_examples=20, deadline=None)
@given(layer=layers(), tokens=st.integers(1, 40))
def test_projections_in_the_operation_give_what_they_give_around_it(layer: Layer, tokens: int) -> None:
    dice = np.random.default_rng(tokens)
    x = mx.array(_draw(dice, 2, tokens, 24))
    pieces = [(0, tokens, 3, 0), (tokens, tokens, 1, 0)]
    into = [native.plain_weights(mx.array(_draw(dice, width, 24) / 5), None) for width in layer.widths]
    apart, *states = layer.operation(*(native.linear(x, weights) for weights in into), *_empty(layer), pieces)
    out = native.plain_weights(mx.array(_draw(dice, 16, apart.shape[-1])), mx.array(_draw(dice, 16)))
    inputs = [[into[index]] for index in layer.inputs]
    whole, *same = layer.layer.through(x, inputs, out, *_empty(layer), pieces)
    assert whole.shape == (2, tokens, 16)
    assert _close(np.array(whole), np.array(native.linear(apart, out)))
    for slot in (1, 3):
        assert all(_close(np.array(a)[slot], np.array(b)[slot]) for a, b in zip(states, same, strict=True))


@settings(max_examples=5, deadline=None)
@given(tokens=st.integers(1, 40))
def test_projections_behind_one_another_are_in_the_operation_too(tokens: int) -> None:
    layer, dice = Delta(np.random.default_rng(0), 2, 1, 8, 8, KIMI), np.random.default_rng(tokens)
    x, low, pieces = mx.array(_draw(dice, tokens, 24)), (3, 5), [(0, tokens, 2, 0)]

    def weights(outputs: int, columns: int) -> Any:
        return native.plain_weights(mx.array(_draw(dice, outputs, columns) / 5), None)

    chains = [[weights(6, 24), weights(w, 6)] if at in low else [weights(w, 24)] for at, w in enumerate(layer.widths)]
    given = []
    for chain in chains:
        given.append(x)
        for each in chain:
            given[-1] = native.linear(given[-1], each)
    apart, *states = layer.operation(*given, *_empty(layer), pieces)
    out = weights(16, apart.shape[-1])
    whole, *same = layer.layer.through(x, chains, out, *_empty(layer), pieces)
    assert _close(np.array(whole), np.array(native.linear(apart, out)))
    assert all(_close(np.array(a)[2], np.array(b)[2]) for a, b in zip(states, same, strict=True))


def test_projections_that_do_not_fit_are_refused() -> None:
    layer = Scanned(np.random.default_rng(0), 1, 1, 8, 8, Norm(0, False), False)
    into, out = (native.plain_weights(mx.zeros(shape), None) for shape in ((layer.widths[0], 24), (16, 8)))
    narrow = native.plain_weights(mx.zeros((16, 7)), None)
    for x, inputs, output, message in (
        (mx.ones((3, 23)), [[into]], out, "disagree about the width"),
        (mx.ones((3, 24)), [[into, into]], out, "disagree about the width"),
        (mx.ones((3, 24)), [[]], out, "has no projection"),
        (mx.ones((3, 24)), [[into], [into]], out, "too many projections"),
        (mx.ones((3, 24)), [[into]], narrow, "last projection"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.layer.through(x, inputs, output, *_empty(layer), [(0, 3, 0, 0)])


def test_states_are_written_in_place() -> None:
    layer = Delta(np.random.default_rng(0), 2, 1, 64, 64, Rule())
    states = [mx.zeros((256, *row)) for row in layer.rows]
    mx.eval(states)
    size = sum(state.nbytes for state in states)
    given = [mx.ones((1, width)) for width in layer.widths]
    mx.eval(given)
    before = settled()
    for position in range(3):
        y, *states = layer.operation(*given, *states, [(0, 1, 5, position)])
        mx.async_eval(y, states)
    mx.eval(states)
    assert mx.get_peak_memory() - before < size / 4


def test_inputs_need_not_lie_in_rows() -> None:
    layer = Delta(np.random.default_rng(0), 2, 2, 8, 8, Rule())
    text = [_draw(np.random.default_rng(1), 9, width) for width in layer.widths]
    expected, _ = _run(layer, text, _empty(layer), [(0, 9, 0, 0)])
    turned = [mx.array(np.ascontiguousarray(x.T)).T for x in text]
    y, *_ = layer.operation(*turned, *_empty(layer), [(0, 9, 0, 0)])
    assert np.array_equal(np.array(y), expected)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 3, SLOTS, 0)], "fit in the states"),
        ([(0, 3, -1, 0)], "fit in the states"),
        ([(0, 4, 0, 0)], "follow one another"),
        ([(0, 2, 0, 0), (1, 1, 1, 2)], "follow one another"),
        ([(0, 2, 0, 0), (2, 1, 0, 2)], "only one piece"),
        ([(2**31 - 1, 1, 0, 0)], "follow one another"),
        ([(1, 2**31 - 1, 0, 0)], "follow one another"),
        ([(0, 3, 0, 2**31 - 1)], "fit in the states"),
    ],
)
@pytest.mark.parametrize("kind", ["convolution", "delta", "scan"])
def test_pieces_that_do_not_fit_are_refused(kind: str, pieces: list[Any], message: str) -> None:
    dice = np.random.default_rng(0)
    layer: Layer = {
        "convolution": lambda: Convolved(dice, 8, 4, True, False),
        "delta": lambda: Delta(dice, 1, 1, 8, 8, Rule()),
        "scan": lambda: Scanned(dice, 1, 1, 8, 8, Norm(0, False), False),
    }[kind]()
    given = [mx.ones((3, width)) for width in layer.widths]
    with pytest.raises(ValueError, match=message):
        layer.operation(*given, *_empty(layer), pieces)
    with pytest.raises(ValueError, match="states do not fit"):
        layer.operation(*given, *(mx.zeros((SLOTS, 7, 7)) for _ in layer.rows), [(0, 3, 0, 0)])
