"""Layers of recurrent mixers with random weights, states and inputs, and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.recurrent.kernels import RecurrentSpans
from ingot.kernels.recurrent.mixers import (
    DeltaKernels,
    DeltaShape,
    Mamba2Kernels,
    Mamba2Shape,
    ShortConvKernels,
    ShortConvShape,
)
from ingot.kernels.recurrent.selfcheck import MixerShape, gate_columns, random_weights

SLOTS = 4
Piece = tuple[int, int, int, int]
LIMIT = (0.05, 1.2)
"""Of Mamba 2's steps."""
BOUND = -5.0
"""Of decays that have one."""
MOST = 1.5
"""Of strengths."""


class Layer:
    def __init__(self, shape: MixerShape, tokens: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> None:
        self.shape, self.dtype, random = shape, dtype, np.random.default_rng(seed)
        self.weights = random_weights(shape, random)
        self.numbers = {name: np.array(weight, np.float64) for name, weight in self.weights.items()}
        self.joint, *self.apart = (
            np.array(mx.array(random.standard_normal((tokens, width), np.float32)).astype(dtype).astype(mx.float32))
            for width in (shape.width, *shape.apart)
        )
        self.before = [random.standard_normal((SLOTS, *sizes), np.float32) / 2 for sizes in shape.states]
        self.restart()

    def restart(self) -> None:
        self.states = [mx.array(np.array(part)) for part in self.before]
        mx.eval(self.states)

    def kernels(self, run: Emulator | None = None, *, in_place: bool = True) -> Any:
        given: tuple[Any, ...] = (run or Emulator(), self.shape, self.dtype, self.weights)
        if isinstance(self.shape, DeltaShape):
            return DeltaKernels(*given, bound=BOUND, most_strength=MOST, in_place=in_place)
        if isinstance(self.shape, Mamba2Shape):
            return Mamba2Kernels(*given, dt_limit=LIMIT, in_place=in_place)
        return ShortConvKernels(*given, in_place=in_place)

    def run(self, pieces: Sequence[Piece], run: Emulator | None = None) -> np.ndarray:
        """What the output projection takes; states are written in place."""
        joint, *apart = self.given()
        mixed, after = self.kernels(run).mix(joint, RecurrentSpans.of(pieces), self.states, *apart)
        assert not after
        return np.array(mixed.astype(mx.float32))

    def run_apart(self, pieces: Sequence[Piece]) -> tuple[np.ndarray, list[np.ndarray]]:
        """The same, and the rows' states after that, which are not written in place."""
        joint, *apart = self.given()
        mixed, after = self.kernels(in_place=False).mix(joint, RecurrentSpans.of(pieces), self.states, *apart)
        return np.array(mixed.astype(mx.float32)), [np.array(part) for part in after]

    def kept(self, pieces: Sequence[Piece], keep: Sequence[bool]) -> np.ndarray:
        kernels, (joint, *apart), spans = self.kernels(), self.given(), RecurrentSpans.of(pieces, keep=keep)
        convolved, _ = kernels.convolve(joint, spans, self.states[0])
        return np.array(kernels.advance(convolved, joint, spans, self.states[1], *apart)[1])

    def given(self) -> list[mx.array]:
        """The joint projection, and those apart from it."""
        return [mx.array(each).astype(self.dtype) for each in (self.joint, *self.apart)]

    def expected(self, first: int, count: int, slot: int, start: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """What the output projection takes, and the state after each token, in float64."""
        shape, mine = self.shape, slice(first, first + count)
        joint, *apart = (each[mine].astype(np.float64) for each in (self.joint, *self.apart))
        tail, *state = (np.zeros_like(part[slot]) if start == 0 else part[slot] for part in self.before)
        if isinstance(shape, ShortConvShape):
            b, c, x = np.split(joint, 3, axis=-1)
            return c * self._convolved(b * x, tail), []
        if isinstance(shape, Mamba2Shape):
            x = self._convolved(joint[:, shape.inner : -shape.heads], tail)
            read, states = self._scanned(shape, _silu(x), joint[:, -shape.heads :], state[0].astype(np.float64))
        else:
            x = _silu(self._convolved(joint[:, np.array(shape.columns)], tail))
            factors = np.concatenate([joint[:, shape.factors :], *apart[-1:] * shape.decays_apart], axis=-1)
            read, states = self._advanced(shape, x, factors, state[0].astype(np.float64))
            joint = apart[0] if shape.gates_apart else joint
        return self._gated(shape, read.reshape(count, -1), joint), states

    def _convolved(self, x: np.ndarray, tail: np.ndarray) -> np.ndarray:
        rows, filter = np.concatenate([tail, x]), self.numbers["filter"][..., 0]
        summed = sum(rows[tap : tap + len(x)] * filter[:, tap] for tap in range(filter.shape[1]))
        return np.asarray(summed + self.numbers.get("filter_bias", 0.0))

    def _scanned(
        self, shape: Mamba2Shape, x: np.ndarray, dt: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        x, b, c = np.split(x, [shape.inner, shape.inner + shape.groups * shape.state_size], axis=-1)
        b, c = (np.repeat(part.reshape(len(x), shape.groups, -1), shape.heads // shape.groups, 1) for part in (b, c))
        x = x.reshape(len(x), shape.heads, -1)
        dt = np.clip(np.logaddexp(0, dt + self.numbers["dt_bias"]), *LIMIT)
        read, states = [], []
        for t in range(len(x)):
            decay = np.exp(-np.exp(self.numbers["a_log"]) * dt[t])
            state = state * decay[:, None, None] + np.einsum("h,hp,hn->hpn", dt[t], x[t], b[t])
            read.append(np.einsum("hpn,hn->hp", state, c[t]) + self.numbers["skip"][:, None] * x[t])
            states.append(state)
        return np.array(read), states

    def _advanced(
        self, shape: DeltaShape, x: np.ndarray, factors: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        keys = shape.key_heads * shape.key_size
        q, k, v = np.split(x, [keys, 2 * keys], axis=-1)
        q, k = (np.repeat(part.reshape(len(x), shape.key_heads, -1), shape.in_group, 1) for part in (q, k))
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        v = v.reshape(len(x), shape.value_heads, -1)
        groups = factors.reshape(len(x), shape.key_heads if shape.interleaved else 1, -1)
        count = shape.value_heads // groups.shape[1]
        b, a = (part.reshape(len(x), -1) for part in (groups[..., :count], groups[..., count:]))
        raw = (a + self.numbers["dt_bias"]).reshape(len(x), shape.value_heads, -1)
        rates = np.exp(self.numbers["a_log"])[:, None]
        decays = np.exp(BOUND / (1 + np.exp(-rates * raw)) if shape.bounded else -rates * np.logaddexp(0, raw))
        read, states = [], []
        for t in range(len(x)):
            state = state * decays[t][:, None]
            delta = (v[t] - np.einsum("hvk,hk->hv", state, k[t])) * MOST / (1 + np.exp(-b[t]))[:, None]
            state = state + delta[..., None] * k[t][:, None]
            read.append(np.einsum("hvk,hk->hv", state, q[t]) * shape.key_size**-0.5)
            states.append(state)
        return np.array(read), states

    def _gated(self, shape: DeltaShape | Mamba2Shape, read: np.ndarray, joint: np.ndarray) -> np.ndarray:
        norm, eps = shape.norm, 1e-6 if isinstance(shape, DeltaShape) else 1e-5
        gates = joint[:, gate_columns(norm, read.shape[1])]
        opened = 1 / (1 + np.exp(-gates)) if norm.sigmoid else _silu(gates)

        def normed(x: np.ndarray) -> np.ndarray:
            if not norm.size:
                return x
            parts = x.reshape(len(x), -1, norm.size)
            parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)
            return parts.reshape(x.shape) * np.resize(self.numbers["norm"], x.shape[1])

        return opened * normed(read) if norm.first else normed(opened * read)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def close(found: np.ndarray, wanted: np.ndarray, bound: float) -> bool:
    return bool(np.abs(found - wanted).max() <= bound * np.abs(wanted).max())
