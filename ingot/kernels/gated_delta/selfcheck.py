"""The gated delta rule's kernels are compared with plain operations in float32 on the device at hand: a kernel that
differs or does not compile is not used. Each kind of layer is compared once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gated_delta.kernels import DeltaKernels, DeltaShape, DeltaSpans, delta_kernels
from ingot.kernels.selfcheck import BOUNDS, Case, Verdicts, check_cases


class CheckedDelta(Verdicts[tuple[DeltaShape, mx.Dtype, bool], bool]):
    """The gated delta kernels of a device. Metal uses mlx-lm's."""

    def of(
        self,
        shape: DeltaShape,
        dtype: mx.Dtype,
        *,
        filter: mx.array,
        a_log: mx.array,
        dt_bias: mx.array,
        joint: bool = False,
    ) -> DeltaKernels | None:
        """None where there are no right kernels for such a layer. `joint`: one product gives all that they read."""
        if self._device.kind == "metal" or not self._first_right(
            (shape, dtype, joint),
            [True],
            lambda _: shape.unsupported() or check_delta_kernels(self._device, shape, dtype, joint=joint),
        ):
            return None
        return delta_kernels(self._device, shape, dtype, filter=filter, a_log=a_log, dt_bias=dt_bias)


PIECES = ((0, 1, 2, 9), (1, 19, 0, 0), (20, 3, 3, 1))
"""Rows of a forward pass: first token, tokens, slot, and how many came before. One slot is unused."""
SLOTS = 4


def check_delta_kernels(device: Device, shape: DeltaShape, dtype: mx.Dtype, *, joint: bool = False) -> str | None:
    """The first wrong kernel for such layers on this device; None where all are right."""
    random = np.random.default_rng(3)
    filter = _random(random, shape.channels, shape.taps, 1)
    decays = {name: _random(random, shape.value_heads) for name in ("a_log", "dt_bias")}
    return check_cases(
        device,
        ("delta", shape, dtype, joint),
        lambda: delta_kernels(device, shape, dtype, filter=filter, **decays),
        lambda kernels: _cases(kernels, dtype, filter[..., 0], decays, joint=joint),
    )


def _cases(
    kernels: DeltaKernels, dtype: mx.Dtype, filter: mx.array, decays: dict[str, Any], *, joint: bool
) -> Iterator[Case]:
    shape, random, bound = kernels.shape, np.random.default_rng(4), BOUNDS[dtype]
    tokens = sum(count for _, count, _, _ in PIECES)
    x, a, b = (_random(random, tokens, size).astype(dtype) for size in (shape.channels, *[shape.value_heads] * 2))
    tails = _random(random, SLOTS, *shape.tail).astype(dtype).astype(mx.float32)
    states = _random(random, SLOTS, *shape.state) * 0.3
    before = [mx.array(np.array(part)) for part in (tails, states)]
    spans = DeltaSpans.of(PIECES, keep=[True, False, True])
    given, begins = (x, a, b), (0, 0)
    if joint:
        gates, strengths, begin = shape.columns
        whole = mx.concatenate([x, mx.full((tokens, strengths - gates), float("nan"), dtype), b, a], axis=-1)
        given, begins = (whole, whole, whole), (begin, strengths)
    convolved = kernels.convolve(given[0], spans, tails)
    y, earlier = kernels.advance(convolved, *given[1:], spans, states, begins)
    mx.eval(convolved, y, earlier)
    for first, count, slot, start in PIECES:
        mine, fresh = slice(first, first + count), start == 0
        tail, state = (mx.zeros_like(part[slot]) if fresh else part[slot] for part in before)
        filtered, tail = plain_convolution(x[mine], filter, tail)
        yield Case(f"convolve differs over {count} tokens", convolved[mine], filtered, bound)
        yield Case(f"convolve differs over {count} tokens", tails[slot], tail, bound)
        read, after = plain_delta_rule(shape, convolved[mine], a[mine], b[mine], state, **decays)
        yield Case(f"advance differs over {count} tokens", y[mine], read, bound)
        yield Case(f"advance differs over {count} tokens", states[slot], after[-1], bound)
        if not fresh:
            message = f"advance returns other states than those after each of {count} tokens"
            yield Case(message, earlier[:1] if count == 1 else earlier[1:], after, bound)
    idle = next(slot for slot in range(SLOTS) if slot not in {piece[2] for piece in PIECES})
    for now, was in zip((tails, states), before, strict=True):
        yield Case("another row's states were written", now[idle], was[idle])


def _random(random: np.random.Generator, *sizes: int) -> mx.array:
    return mx.array(random.standard_normal(sizes, np.float32))


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
    """The output of x [tokens, channels] with a state [value heads, value, key size], and the states after each
    token."""
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
        recalled = mx.sum(state * k[token][:, None], axis=-1)
        delta = (v[token] - recalled) * strengths[token][:, None]
        state = state + delta[..., None] * k[token][:, None]
        read.append(mx.sum(state * q[token][:, None], axis=-1))
        states.append(state)
    return mx.stack(read), mx.stack(states)


def _unit_length(x: mx.array, eps: float) -> mx.array:
    return x / mx.sqrt(mx.sum(x * x, axis=-1, keepdims=True) + eps)
