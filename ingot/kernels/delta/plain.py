"""The gated delta rule by plain operations in float32, one token after another."""

from __future__ import annotations

import mlx.core as mx

from ingot.kernels.gated_delta.kernels import DeltaShape


def convolved(x: mx.array, filter: mx.array, tail: mx.array) -> tuple[mx.array, mx.array]:
    """x [tokens, channels] behind `tail` [taps - 1, channels], filtered by [channels, taps] and gated; the new tail."""
    rows = mx.concatenate([tail, x.astype(mx.float32)])
    taps = filter.shape[1]
    summed = mx.zeros((1, 1))
    for tap in range(taps):
        summed = summed + rows[tap : tap + x.shape[0]] * filter[:, tap]
    return summed * mx.sigmoid(summed), rows[rows.shape[0] - taps + 1 :]


def advanced(
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
    q, k = (_unit(part.reshape(-1, shape.key_heads, shape.key_size), eps) for part in (q, k))
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


def _unit(x: mx.array, eps: float) -> mx.array:
    return x / mx.sqrt(mx.sum(x * x, axis=-1, keepdims=True) + eps)
