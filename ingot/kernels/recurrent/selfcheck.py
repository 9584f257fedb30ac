"""The kernels of recurrent mixers are compared with plain operations in float32 on the device at hand: a kernel that
differs or does not compile is not used. Each kind of layer is compared once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import required_launcher
from ingot.kernels.measured import recurrent_part
from ingot.kernels.recurrent.kernels import Convolution, GatedNorm, RecurrentKernels, RecurrentSpans
from ingot.kernels.recurrent.mixers import (
    DeltaKernels,
    DeltaShape,
    Mamba2Kernels,
    Mamba2Shape,
    ShortConvKernels,
    ShortConvShape,
)
from ingot.kernels.selfcheck import BOUNDS, Case, Verdicts, check_cases

MixerShape = DeltaShape | Mamba2Shape | ShortConvShape
KERNELS: Mapping[type, Any] = {
    DeltaShape: DeltaKernels,
    Mamba2Shape: Mamba2Kernels,
    ShortConvShape: ShortConvKernels,
}


def recurrent_kernels(
    device: Device, shape: MixerShape, dtype: mx.Dtype, weights: Mapping[str, mx.array], **options: Any
) -> RecurrentKernels:
    """Raises ValueError where there are none."""
    made: RecurrentKernels = KERNELS[type(shape)](
        required_launcher(device), shape, dtype, weights, in_place=device.kind != "metal", **options
    )
    return made


class CheckedRecurrences(Verdicts[tuple[MixerShape, mx.Dtype], bool]):
    """The kernels of recurrent mixers of a device."""

    def of(
        self, shape: MixerShape, dtype: mx.Dtype, weights: Mapping[str, mx.array], **options: Any
    ) -> RecurrentKernels | None:
        """None where there are no right kernels for such a layer."""
        if self._slower_parts.leave_out(recurrent_part(shape)):
            return None
        key = shape, dtype
        if not self._first_right(
            key, [True], lambda _: shape.unsupported() or check_recurrent_kernels(self._device, shape, dtype)
        ):
            return None
        return recurrent_kernels(self._device, shape, dtype, weights, **options)


PIECES = ((0, 1, 2, 9), (1, 69, 0, 0), (70, 3, 3, 1))
"""Rows of a forward pass: first token, tokens, slot, and how many came before. One slot is unused."""
SLOTS = 4
DT_LIMIT = (0.3, 1.5)
BOUND = -5.0
MOST_STRENGTH = 1.5


def check_recurrent_kernels(device: Device, shape: MixerShape, dtype: mx.Dtype) -> str | None:
    """The first wrong kernel for such layers on this device; None where all are right."""
    weights = random_weights(shape, np.random.default_rng(3))
    return check_cases(
        device,
        ("recurrent", shape, dtype),
        lambda: recurrent_kernels(device, shape, dtype, weights, **_options(shape)),
        lambda kernels: _cases(kernels, shape, dtype, weights),
    )


def _options(shape: MixerShape) -> dict[str, Any]:
    if isinstance(shape, DeltaShape):
        return {"bound": BOUND, "most_strength": MOST_STRENGTH}
    return {"dt_limit": DT_LIMIT} if isinstance(shape, Mamba2Shape) else {}


def random_weights(shape: MixerShape, random: np.random.Generator) -> dict[str, mx.array]:
    """Weights of such a layer, by the names that its kernels know."""
    own = shape.convolution
    weights = {"filter": _random(random, own.channels, own.taps, 1)}
    if own.biased:
        weights["filter_bias"] = _random(random, own.channels)
    if isinstance(shape, DeltaShape):
        weights |= {"a_log": _random(random, shape.value_heads), "dt_bias": _random(random, shape.decays)}
        weights["norm"] = _random(random, shape.value_size)
    if isinstance(shape, Mamba2Shape):
        weights |= {name: _random(random, shape.heads) for name in ("a_log", "dt_bias", "skip")}
        weights["norm"] = _random(random, shape.inner)
    return weights


def _cases(
    kernels: RecurrentKernels, shape: MixerShape, dtype: mx.Dtype, weights: Mapping[str, mx.array]
) -> Iterator[Case]:
    random, bound = np.random.default_rng(4), BOUNDS[dtype]
    tokens = sum(count for _, count, _, _ in PIECES)
    joint, *apart = (_random(random, tokens, width).astype(dtype) for width in (shape.width, *shape.apart))
    # Tails are what entered, which is a product of two numbers where these are gated.
    states = [_random(random, SLOTS, *sizes) * 0.3 for sizes in shape.states]
    states[0] = states[0].astype(dtype).astype(mx.float32)
    before = [mx.array(np.array(part)) for part in states]
    spans = RecurrentSpans.of(PIECES, keep=[True, False, True])
    convolved, tails = kernels.convolve(joint, spans, states[0])
    mx.eval(convolved, tails)
    read = kernels.advance(convolved, joint, spans, states[-1], *apart) if kernels.rule else None
    mx.eval(read)
    for row, (first, count, slot, start) in enumerate(PIECES):
        mine, over = slice(first, first + count), f"over {count} tokens"
        old = [mx.zeros_like(part[slot]) if start == 0 else part[slot] for part in before]
        filtered, tail = plain_convolution(shape.convolution, entering(shape, joint[mine]), weights, old[0])
        yield Case(f"convolve differs {over}", convolved[mine], gated_by(shape, filtered, joint[mine]), bound)
        yield Case(f"convolve differs {over}", tails[0][row] if tails else states[0][slot], tail, bound)
        if read is None:
            continue
        y, earlier, states_after = read
        own = [each[mine] for each in apart]
        wanted, after = _plain_rule(shape, convolved[mine], joint[mine], old[1], weights, *own)
        yield Case(f"{kernels.rule} differs {over}", y[mine], wanted, bound)
        state = states_after[0][row] if states_after else states[1][slot]
        yield Case(f"{kernels.rule} differs {over}", state, after[-1], bound)
        if start:
            message = f"{kernels.rule} returns other states than those after each of {count} tokens"
            yield Case(message, earlier[:1] if count == 1 else earlier[1:], mx.stack(after), bound)
    if read is not None:
        eps = 1e-6 if isinstance(shape, DeltaShape) else 1e-5
        gates = shape.gates(joint, *apart)[:, mx.array(gate_columns(shape.norm, shape.inner))]
        wanted = plain_gate(shape.norm, read[0], gates, weights["norm"].astype(dtype), eps)
        yield Case("gate differs", kernels.gate(read[0], joint, *apart), wanted, bound)
    idle = next(slot for slot in range(SLOTS) if slot not in {piece[2] for piece in PIECES})
    for now, was in zip(states, before, strict=True):
        yield Case("another row's states were written", now[idle], was[idle])


def _plain_rule(
    shape: MixerShape,
    x: mx.array,
    joint: mx.array,
    state: mx.array,
    weights: Mapping[str, mx.array],
    *apart: mx.array,
) -> tuple[mx.array, list[mx.array]]:
    if isinstance(shape, DeltaShape):
        return plain_delta_rule(shape, x, joint, state, weights, *apart)
    assert isinstance(shape, Mamba2Shape)
    return plain_scan(shape, x, joint, state, weights, DT_LIMIT)


def _random(random: np.random.Generator, *sizes: int) -> mx.array:
    return mx.array(random.standard_normal(sizes, np.float32))


def entering(shape: MixerShape, joint: mx.array) -> mx.array:
    """What is convolved, [tokens, channels], of joint projections."""
    if isinstance(shape, DeltaShape):
        return joint[:, shape.columns]
    if isinstance(shape, Mamba2Shape):
        return joint[:, shape.inner : shape.inner + shape.convolution.channels]
    return joint[:, : shape.channels] * joint[:, 2 * shape.channels :]


def gated_by(shape: MixerShape, filtered: mx.array, joint: mx.array) -> mx.array:
    if not isinstance(shape, ShortConvShape):
        return filtered
    return filtered * joint[:, shape.channels : 2 * shape.channels].astype(mx.float32)


def plain_convolution(
    shape: Convolution, x: mx.array, weights: Mapping[str, mx.array], tail: mx.array
) -> tuple[mx.array, mx.array]:
    """x [tokens, channels] behind `tail` [taps - 1, channels], filtered; and the new tail."""
    rows, filter = mx.concatenate([tail, x.astype(mx.float32)]), weights["filter"][..., 0]
    summed = weights["filter_bias"] if shape.biased else mx.zeros((1, 1))
    for tap in range(shape.taps):
        summed = summed + rows[tap : tap + x.shape[0]] * filter[:, tap]
    return summed * mx.sigmoid(summed) if shape.silu else summed, rows[rows.shape[0] - shape.taps + 1 :]


def plain_delta_rule(
    shape: DeltaShape,
    x: mx.array,
    joint: mx.array,
    state: mx.array,
    weights: Mapping[str, mx.array],
    *apart: mx.array,
    eps: float = 1e-6,
) -> tuple[mx.array, list[mx.array]]:
    """The output of x [tokens, channels] with a state [value heads, value, key size], and the states after each
    token."""
    keys, group = shape.key_heads * shape.key_size, shape.in_group
    q, k, v = mx.split(x.astype(mx.float32), [keys, 2 * keys], axis=-1)
    q, k = (_unit_length(part.reshape(-1, shape.key_heads, shape.key_size), eps) for part in (q, k))
    q, k = mx.repeat(q, group, 1) * shape.key_size**-0.5, mx.repeat(k, group, 1)
    v = v.reshape(-1, shape.value_heads, shape.value_size)
    a, b = delta_factors(shape, joint, *apart)
    raw = (a + weights["dt_bias"]).reshape(x.shape[0], shape.value_heads, 1, -1)
    rates = mx.exp(weights["a_log"])[:, None, None]
    decays = mx.exp(BOUND * mx.sigmoid(rates * raw) if shape.bounded else -rates * _softplus(raw))
    strengths = MOST_STRENGTH * mx.sigmoid(b)
    read, states = [], []
    for token in range(x.shape[0]):
        state = state * decays[token]
        recalled = mx.sum(state * k[token][:, None], axis=-1)
        delta = (v[token] - recalled) * strengths[token][:, None]
        state = state + delta[..., None] * k[token][:, None]
        read.append(mx.sum(state * q[token][:, None], axis=-1))
        states.append(state)
    return mx.stack(read).flatten(1), states


def delta_factors(shape: DeltaShape, joint: mx.array, *apart: mx.array) -> tuple[mx.array, mx.array]:
    """What decays and strengths are made of, [tokens, decays] and [tokens, value heads]."""
    factors = joint[:, shape.factors :].astype(mx.float32)
    if not shape.interleaved:
        b, a = mx.split(factors, [shape.value_heads], axis=-1)
        return apart[-1].astype(mx.float32) if shape.decays_apart else a, b
    b, a = mx.split(factors.reshape(-1, shape.key_heads, 2 * shape.in_group), 2, axis=-1)
    return a.flatten(1), b.flatten(1)


def plain_scan(
    shape: Mamba2Shape,
    x: mx.array,
    joint: mx.array,
    state: mx.array,
    weights: Mapping[str, mx.array],
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[mx.array, list[mx.array]]:
    """The output of x [tokens, channels] with a state [heads, head size, state size], and the states after each
    token."""
    sizes = [shape.inner, shape.inner + shape.groups * shape.state_size]
    values, writers, readers = mx.split(x.astype(mx.float32), sizes, axis=-1)
    values = values.reshape(-1, shape.heads, shape.head_size)
    writers, readers = (
        mx.repeat(part.reshape(-1, shape.groups, shape.state_size), shape.heads // shape.groups, 1)
        for part in (writers, readers)
    )
    steps = mx.clip(_softplus(joint[:, -shape.heads :].astype(mx.float32) + weights["dt_bias"]), *dt_limit)
    decays = mx.exp(-mx.exp(weights["a_log"]) * steps)
    read, states = [], []
    for token in range(x.shape[0]):
        given = (values[token] * steps[token][:, None])[..., None] * writers[token][:, None]
        state = state * decays[token][:, None, None] + given
        skipped = weights["skip"][:, None] * values[token]
        read.append(mx.sum(state * readers[token][:, None], axis=-1) + skipped)
        states.append(state)
    return mx.stack(read).flatten(1), states


def gate_columns(norm: GatedNorm, size: int) -> list[int]:
    """The column of each number's gate."""
    begin, span, step = norm.gates
    return [begin + number // span * step + number % span for number in range(size)]


def plain_gate(norm: GatedNorm, read: mx.array, gates: mx.array, weight: mx.array, eps: float) -> mx.array:
    read, gates, weight = (part.astype(mx.float32) for part in (read, gates, weight))
    opened = mx.sigmoid(gates) if norm.sigmoid else gates * mx.sigmoid(gates)
    if not norm.size:
        return opened * read

    def normed(x: mx.array) -> mx.array:
        parts = x.reshape(x.shape[0], -1, norm.size)
        parts = parts / mx.sqrt(mx.mean(parts * parts, axis=-1, keepdims=True) + eps)
        return parts.reshape(x.shape) * mx.tile(weight, x.shape[1] // weight.size)

    return opened * normed(read) if norm.first else normed(opened * read)


def _softplus(x: mx.array) -> mx.array:
    return mx.logaddexp(x, mx.array(0.0))


def _unit_length(x: mx.array, eps: float) -> mx.array:
    return x / mx.sqrt(mx.sum(x * x, axis=-1, keepdims=True) + eps)
