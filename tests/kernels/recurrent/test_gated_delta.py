"""The gated delta rule as a GPU would run it, against float64; and that no bit depends on how tokens are cut."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.kernels.gated_delta.kernels import DeltaKernels, DeltaShape, DeltaSpans
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import KernelText
from tests.kernels.paged_attention.memory import emulated

pytestmark = emulated
SMALL = DeltaShape(2, 4, 16, 16, 4)
SLOTS = 4
Piece = tuple[int, int, int, int]


class Layer:
    """Random weights, states and inputs of a layer, and what float64 makes of them."""

    def __init__(self, shape: DeltaShape, tokens: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> None:
        self.shape, self.dtype, self._random = shape, dtype, np.random.default_rng(seed)
        self.filter, self.a_log, self.dt_bias = (
            self._drawn(*sizes)
            for sizes in ((shape.channels, shape.taps, 1), (shape.value_heads,), (shape.value_heads,))
        )
        self.x, self.a, self.b = (
            self._rounded(self._drawn(tokens, size)) for size in (shape.channels, *[shape.value_heads] * 2)
        )
        self.before = [self._drawn(SLOTS, *sizes) / 2 for sizes in (shape.tail, shape.state)]
        self.restart()

    def restart(self) -> None:
        self.tails, self.states = (mx.array(np.array(part)) for part in self.before)
        mx.eval(self.tails, self.states)

    def kernels(self, run: Emulator | None = None) -> DeltaKernels:
        weights = {"filter": mx.array(self.filter), "a_log": mx.array(self.a_log), "dt_bias": mx.array(self.dt_bias)}
        return DeltaKernels(run or Emulator(), self.shape, self.dtype, **weights)

    def run(
        self, pieces: Sequence[Piece], run: Emulator | None = None, keep: Sequence[bool] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        kernels, spans = self.kernels(run), DeltaSpans.of(pieces, keep)
        x, a, b = (mx.array(part).astype(self.dtype) for part in (self.x, self.a, self.b))
        convolved = kernels.convolve(x, spans, self.tails)
        y, kept = kernels.advance(convolved, a, b, spans, self.states)
        return np.array(y.astype(mx.float32)), np.array(kept)

    def expected(self, first: int, count: int, slot: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        """What tokens read, and the state after each, in float64."""
        shape, group = self.shape, self.shape.value_heads // self.shape.key_heads
        tail, state = (np.zeros_like(part[slot]) if start == 0 else part[slot] for part in self.before)
        rows = np.concatenate([tail, self.x[first : first + count]]).astype(np.float64)
        x = sum(rows[tap : tap + count] * self.filter[:, tap, 0] for tap in range(shape.taps))
        x = x / (1 + np.exp(-x))
        ends = [shape.key_heads * shape.key_size, 2 * shape.key_heads * shape.key_size]
        q, k, v = np.split(x, ends, axis=-1)
        q, k = (np.repeat(part.reshape(count, shape.key_heads, -1), group, 1) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        v, state = v.reshape(count, shape.value_heads, -1), state.astype(np.float64)
        read, states = [], []
        for t in range(count):
            decay = np.exp(-np.exp(self.a_log) * np.logaddexp(0, self.a[first + t] + self.dt_bias))
            state = state * decay[:, None, None]
            delta = (v[t] - np.einsum("hvk,hk->hv", state, k[t])) / (1 + np.exp(-self.b[first + t]))[:, None]
            state = state + delta[..., None] * k[t][:, None]
            read.append(np.einsum("hvk,hk->hv", state, q[t]) * shape.key_size**-0.5)
            states.append(state)
        return np.array(read), np.array(states)

    def _drawn(self, *sizes: int) -> np.ndarray:
        return self._random.standard_normal(sizes, np.float32)

    def _rounded(self, numbers: np.ndarray) -> np.ndarray:
        return np.array(mx.array(numbers).astype(self.dtype).astype(mx.float32))


def close(found: np.ndarray, wanted: np.ndarray, bound: float) -> bool:
    return bool(np.abs(found - wanted).max() <= bound * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("shape", "dtype", "bound"),
    [
        (SMALL, mx.float32, 1e-5),
        (DeltaShape(1, 3, 32, 48, 4), mx.float32, 1e-5),
        (DeltaShape(2, 2, 128, 128, 4), mx.bfloat16, 2e-2),
        (DeltaShape(1, 2, 256, 32, 3), mx.float16, 3e-3),
        (DeltaShape(1, 1, 96, 16, 2), mx.float32, 1e-5),
    ],
    ids=str,
)
def test_rows_of_unlike_lengths_are_one_launch(shape: DeltaShape, dtype: mx.Dtype, bound: float) -> None:
    pieces = [(0, 1, 3, 8), (1, 21, 0, 0), (22, 4, 1, 2)]
    layer = Layer(shape, 26, dtype)
    y, _ = layer.run(pieces)
    for first, count, slot, start in pieces:
        read, states = layer.expected(first, count, slot, start)
        assert close(y[first : first + count], read, bound)
        assert close(np.array(layer.states[slot]), states[-1], bound)
    assert np.array_equal(np.array(layer.states[2]), layer.before[1][2]), "a slot that nobody has"
    assert np.array_equal(np.array(layer.tails[2]), layer.before[0][2])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(0, 5), st.integers(0, 2**31))
@settings(max_examples=12, deadline=None)
def test_no_bit_depends_on_how_a_row_is_cut(cuts: list[int], start: int, seed: int) -> None:
    total = sum(cuts)
    layer = Layer(SMALL, total, mx.bfloat16, seed)
    whole, _ = layer.run([(0, total, 1, start)])
    states = [np.array(part[1]) for part in (layer.tails, layer.states)]
    layer.restart()
    found, at = [], 0
    for count in cuts:
        y, _ = layer.run([(at, count, 1, start + at)], Emulator(seed))
        found.append(y[at : at + count])
        at += count
    assert np.array_equal(np.concatenate(found), whole)
    assert all(
        np.array_equal(np.array(part[1]), state)
        for part, state in zip((layer.tails, layer.states), states, strict=True)
    )


def test_the_states_after_each_token_are_given_where_they_are_asked_for() -> None:
    layer = Layer(SMALL, 24)
    pieces = [(0, 3, 2, 4), (3, 17, 0, 1), (20, 4, 1, 0)]
    _, kept = layer.run(pieces, keep=[True, False, True])
    assert kept.shape == (7, *SMALL.state)
    for begin, piece in ((0, pieces[0]), (3, pieces[2])):
        assert close(kept[begin : begin + piece[1]], layer.expected(*piece)[1], 1e-5)
        assert np.array_equal(kept[begin + piece[1] - 1], np.array(layer.states[piece[2]]))


class WithoutBarrier(Emulator):
    def __init__(self, number: int, seed: int) -> None:
        super().__init__(seed)
        self._number = number

    def rewritten(self, text: KernelText) -> KernelText:
        parts = text.body.split("group_barrier();")
        if len(parts) == 1:
            return text
        assert len(parts) == 3, "two barriers"
        return text._replace(body=("" if self._number == 0 else "group_barrier();").join(parts[:2]) + (
            "" if self._number == 1 else "group_barrier();"
        ) + parts[2])  # fmt: skip


@pytest.mark.parametrize("number", [0, 1])
def test_a_missing_barrier_is_found(number: int) -> None:
    layer, pieces = Layer(SMALL, 40), [(0, 40, 1, 0)]
    right, _ = layer.run(pieces)
    found = []
    for seed in range(1, 7):
        layer.restart()
        found.append(not np.array_equal(layer.run(pieces, WithoutBarrier(number, seed))[0], right))
    assert any(found)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (DeltaShape(2, 4, 8, 16, 4), "keys of 8"),
        (DeltaShape(3, 4, 16, 16, 4), "4 value heads over 3"),
        (DeltaShape(2, 4, 16, 16, 9), "over 9 tokens"),
    ],
)
def test_what_there_is_no_kernel_for_is_refused_by_name(shape: DeltaShape, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Layer(shape, 1).kernels()
    with pytest.raises(ValueError, match="int32: there are kernels for"):
        DeltaKernels(Emulator(), SMALL, mx.int32, filter=mx.zeros((96, 4, 1)), a_log=mx.zeros(4), dt_bias=mx.zeros(4))
