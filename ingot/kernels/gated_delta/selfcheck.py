"""The gated delta rule's kernels against plain operations in float32, on the device at hand: what differs, or does not
compile, is not used. Each kind of layer is compared once.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gated_delta.kernels import DeltaKernels, DeltaShape, DeltaSpans, delta_kernels
from ingot.kernels.gpu.launcher import Launcher, compile_kernels


class CheckedDelta:
    """Those of a device. What does not compile or differs is not used, and `wrong` says why. On Metal mlx-lm has one of
    its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[tuple[DeltaShape, mx.Dtype], str] = {}
        self._right: set[tuple[DeltaShape, mx.Dtype]] = set()

    def of(
        self, shape: DeltaShape, dtype: mx.Dtype, *, filter: mx.array, a_log: mx.array, dt_bias: mx.array
    ) -> DeltaKernels | None:
        """None where there are no kernels for such a layer that are right."""
        if self._device.kind == "metal" or not self._is_right(shape, dtype):
            return None
        return delta_kernels(self._device, shape, dtype, filter=filter, a_log=a_log, dt_bias=dt_bias)

    def _is_right(self, shape: DeltaShape, dtype: mx.Dtype) -> bool:
        key = (shape, dtype)
        if key not in self._right and key not in self.wrong:
            wrong = shape.unsupported() or check_delta_kernels(self._device, shape, dtype)
            if wrong is None:
                self._right.add(key)
            else:
                self.wrong[key] = wrong
        return key in self._right


BOUNDS = {mx.float32: 1e-4, mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""Of the largest number, by which an output may be off. It is rounded once."""
PIECES = ((0, 1, 2, 9), (1, 19, 0, 0), (20, 3, 3, 1))
"""Rows of a pass: first token, tokens, slot, and how many came before. One slot is nobody's."""
SLOTS = 4


def check_delta_kernels(device: Device, shape: DeltaShape, dtype: mx.Dtype) -> str | None:
    """What is wrong with the kernels for such layers on this device; None where they are right. Compiles them."""
    random = np.random.default_rng(3)
    weights = _DeltaWeights(shape, random)

    def rehearse(run: Launcher) -> None:
        filter, a_log, dt_bias = weights.filter, weights.a_log, weights.dt_bias
        kernels = DeltaKernels(run, shape, dtype, filter=filter, a_log=a_log, dt_bias=dt_bias)
        _DeltaTrial(kernels, weights, dtype, np.random.default_rng(3)).launched()

    try:
        compile_kernels(device, rehearse)
        kernels = delta_kernels(
            device, shape, dtype, filter=weights.filter, a_log=weights.a_log, dt_bias=weights.dt_bias
        )
        return _DeltaTrial(kernels, weights, dtype, random).wrong()
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


class _DeltaWeights:
    def __init__(self, shape: DeltaShape, random: np.random.Generator) -> None:
        self.filter = mx.array(random.standard_normal((shape.channels, shape.taps, 1), np.float32))
        self.a_log, self.dt_bias = (mx.array(random.standard_normal(shape.value_heads, np.float32)) for _ in range(2))


class _DeltaTrial:
    def __init__(
        self, kernels: DeltaKernels, weights: _DeltaWeights, dtype: mx.Dtype, random: np.random.Generator
    ) -> None:
        self._kernels, self._weights, self._dtype = kernels, weights, dtype
        shape = self._shape = kernels.shape
        tokens = sum(count for _, count, _, _ in PIECES)
        drawn = (
            random.standard_normal((tokens, size), np.float32) for size in (shape.channels, *[shape.value_heads] * 2)
        )
        self._x, self._a, self._b = (mx.array(numbers).astype(dtype) for numbers in drawn)
        self._tails = (
            mx.array(random.standard_normal((SLOTS, *shape.tail), np.float32)).astype(dtype).astype(mx.float32)
        )
        self._states = mx.array(random.standard_normal((SLOTS, *shape.state), np.float32)) * 0.3
        mx.eval(self._x, self._a, self._b, self._tails, self._states)

    def launched(self) -> tuple[mx.array, mx.array, mx.array]:
        spans = DeltaSpans.of(PIECES, keep=[True, False, True])
        convolved = self._kernels.convolve(self._x, spans, self._tails)
        return convolved, *self._kernels.advance(convolved, self._a, self._b, spans, self._states)

    def wrong(self) -> str | None:
        before = [mx.array(np.array(part)) for part in (self._tails, self._states)]
        convolved, y, kept = self.launched()
        mx.eval(convolved, y, kept)
        for first, count, slot, start in PIECES:
            mine, fresh = slice(first, first + count), start == 0
            tail, state = (mx.zeros_like(part[slot]) if fresh else part[slot] for part in before)
            wanted, tail = plain_convolution(self._x[mine], self._weights.filter[..., 0], tail)
            if self._off(convolved[mine], wanted) or self._off(self._tails[slot], tail):
                return f"convolve differs over {count} tokens"
            read, states = plain_delta_rule(
                self._shape,
                convolved[mine],
                self._a[mine],
                self._b[mine],
                state,
                a_log=self._weights.a_log,
                dt_bias=self._weights.dt_bias,
            )
            if self._off(y[mine], read) or self._off(self._states[slot], states[-1]):
                return f"advance differs over {count} tokens"
            if not fresh and self._off(kept[:1] if count == 1 else kept[1:], states):
                return f"advance keeps other states than those after each of {count} tokens"
        idle = next(slot for slot in range(SLOTS) if slot not in {piece[2] for piece in PIECES})
        untouched = all(
            mx.array_equal(now[idle], was[idle]).item()
            for now, was in zip((self._tails, self._states), before, strict=True)
        )
        return None if untouched else "another row's states were written"

    def _off(self, found: mx.array, wanted: mx.array) -> bool:
        gap = mx.abs(found.astype(mx.float32) - wanted).max() / mx.abs(wanted).max()
        return not float(gap) <= BOUNDS[self._dtype]  # nor what is not a number


def plain_convolution(x: mx.array, filter: mx.array, tail: mx.array) -> tuple[mx.array, mx.array]:
    """x [tokens, channels] behind `tail` [taps - 1, channels], filtered by [channels, taps] and gated; the new tail."""
    rows = mx.concatenate([tail, x.astype(mx.float32)])
    taps = filter.shape[1]
    summed = mx.zeros((1, 1))
    for tap in range(taps):
        summed = summed + rows[tap : tap + x.shape[0]] * filter[:, tap]
    return summed * mx.sigmoid(summed), rows[rows.shape[0] - taps + 1 :]


def plain_delta_rule(
    shape: DeltaShape,
    x: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array,
    *,
    a_log: mx.array,
    dt_bias: mx.array,
    eps: float = 1e-6,
) -> tuple[mx.array, mx.array]:
    """What x [tokens, channels] reads of a state [value heads, value, key size], and the states after each token."""
    keys, group = shape.key_heads * shape.key_size, shape.value_heads // shape.key_heads
    q, k, v = mx.split(x.astype(mx.float32), [keys, 2 * keys], axis=-1)
    q, k = (_unit_length(part.reshape(-1, shape.key_heads, shape.key_size), eps) for part in (q, k))
    q, k = mx.repeat(q, group, 1) * shape.key_size**-0.5, mx.repeat(k, group, 1)
    v = v.reshape(-1, shape.value_heads, shape.value_size)
    softplus = mx.logaddexp(a.astype(mx.float32) + dt_bias, mx.array(0.0))
    decays, strengths = mx.exp(-mx.exp(a_log) * softplus), mx.sigmoid(b.astype(mx.float32))
    read, states = [], []
    for token in range(x.shape[0]):
        state = state * decays[token][:, None, None]
        known = mx.sum(state * k[token][:, None], axis=-1)
        delta = (v[token] - known) * strengths[token][:, None]
        state = state + delta[..., None] * k[token][:, None]
        read.append(mx.sum(state * q[token][:, None], axis=-1))
        states.append(state)
    return mx.stack(read), mx.stack(states)


def _unit_length(x: mx.array, eps: float) -> mx.array:
    return x / mx.sqrt(mx.sum(x * x, axis=-1, keepdims=True) + eps)
