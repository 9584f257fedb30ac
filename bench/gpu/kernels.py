"""The kernels by themselves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from bench.gpu.goals import Figure
from bench.gpu.scale import Scale
from bench.paged import Trial, seconds
from ingot.kernels.device import current_device
from ingot.kernels.gated_delta.kernels import DeltaShape, DeltaSpans, delta_kernels
from ingot.kernels.paged_attention.inputs import order_after
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.upstream import import_upstream

ROUNDS = 5


def attention(scale: Scale) -> Iterator[Figure]:
    """Bytes of keys and values over the time, beside pages gathered for MLX's own attention."""
    heads = (
        {"128": AttentionShape(4, 2, 16, 16), "256": AttentionShape(4, 2, 32, 32)}
        if scale.tiny
        else {
            **{"128": AttentionShape(32, 8, 128, 128), "256": AttentionShape(16, 2, 256, 256)},
            "512": AttentionShape(16, 2, 512, 512),
            "latents, 20 over one": AttentionShape(20, 1, 512, 64, latent=True),
            "latents, 128 over one": AttentionShape(128, 1, 512, 64, latent=True),
        }
    )
    alike = [scale.depth] * scale.rows
    mixed = [
        scale.depth // 8 + (2 * scale.depth - scale.depth // 8) * row // (scale.rows - 1) for row in range(scale.rows)
    ]
    speeds = []
    for name, shape in heads.items():
        trial = Trial(current_device(), shape, alike)
        speeds.append(trial.bytes() / _median(trial, scale) / 1e12)
        beside = trial.bytes() / min(seconds(trial.gathered, 1) for _ in range(3)) / 1e12
        yield Figure(f"attention, 8 x 8K, heads of {name}", speeds[-1], "TB/s", beside)
    trial = Trial(current_device(), heads["128"], mixed)
    over = trial.bytes() / _median(trial, scale) / 1e12 / speeds[0]
    yield Figure("attention, 1K to 16K mixed, over alike", over, "x")
    yield from _widths(heads["128"], scale)


def _widths(shape: AttentionShape, scale: Scale) -> Iterator[Figure]:
    trial = Trial(current_device(), shape, [scale.wide_depth] * scale.rows)
    single = _median(trial, scale)
    for width in (4, 8, 16):
        trial.ask(width)
        yield Figure(f"attention, width {width} at 32K, over width 1", _median(trial, scale) / single, "x")


class DeltaTrial:
    """A layer of Qwen 3.5's: its gates, its convolution and its rule, without the products around them."""

    def __init__(self, scale: Scale, rows: int, tokens: int) -> None:
        self.shape = DeltaShape(1, 2, 32, 32, 4) if scale.tiny else DeltaShape(16, 32, 128, 128, 4)
        shape, self.rows, self.tokens = self.shape, rows, tokens
        self.filter = mx.random.normal((shape.channels, shape.taps, 1)).astype(mx.bfloat16)
        self.a_log, self.dt_bias = mx.random.normal((shape.value_heads,)), mx.ones(shape.value_heads)
        self.x = mx.random.normal((rows, tokens, shape.channels)).astype(mx.bfloat16)
        self.a, self.b = (mx.random.normal((rows, tokens, shape.value_heads)).astype(mx.bfloat16) for _ in range(2))
        self.tails, self.states = mx.zeros((rows, *shape.tail)), mx.zeros((rows, *shape.state))
        self.kernels = delta_kernels(
            current_device(), shape, mx.bfloat16, filter=self.filter, a_log=self.a_log, dt_bias=self.dt_bias
        )
        self._last = mx.zeros(1)
        self.spans = DeltaSpans.of([(row * tokens, tokens, row, 0) for row in range(rows)])
        mx.eval(self.filter, self.a_log, self.dt_bias, self.x, self.a, self.b, self.tails, self.states)

    def ours(self) -> mx.array:
        """Behind the one before: a device would run several at once, which those of a model never do."""
        x, a, b = (part.flatten(0, 1) for part in (self.x, self.a, self.b))
        spans = replace(self.spans, spans=order_after(self.spans.spans, self._last))
        convolved = self.kernels.convolve(x, spans, self.tails)
        self._last, _ = self.kernels.advance(convolved, a, b, spans, self.states)
        return self._last

    def theirs(self) -> mx.array:
        """As mlx-lm's module computes it."""
        shape, gated = self.shape, import_upstream("mlx_lm.models.gated_delta")
        padded = mx.concatenate([mx.zeros((self.rows, shape.taps - 1, shape.channels), mx.bfloat16), self.x], axis=1)
        x = nn.silu(mx.conv1d(padded, self.filter, groups=shape.channels))
        keys = shape.key_heads * shape.key_size
        q, k, v = mx.split(x, [keys, 2 * keys], axis=-1)
        q, k = (part.reshape(self.rows, self.tokens, shape.key_heads, shape.key_size) for part in (q, k))
        v = v.reshape(self.rows, self.tokens, shape.value_heads, shape.value_size)
        q, k = gated.normalize_qk(q, k, inv_scale=shape.key_size**-0.5, eps=1e-6)
        read, _ = gated.gated_delta_update(q, k, v, self.a, self.b, self.a_log, self.dt_bias, None)
        found: mx.array = read
        return found


def delta(scale: Scale) -> Iterator[Figure]:
    """Milliseconds of a prompt's piece and of a step, and what mlx-lm's own code takes."""
    prompt, step = DeltaTrial(scale, 1, scale.tokens), DeltaTrial(scale, 4 if scale.tiny else 32, 1)
    names = {"2,048 tokens of a layer": prompt, "a step of 32 rows": step}
    for name, trial in names.items():  # all of ours first: theirs may take longer than there is time
        seconds(trial.ours, 1)
        ours = statistics.median(seconds(trial.ours, scale.repeats) for _ in range(ROUNDS))
        yield Figure(f"gated delta, {name}", 1000 * ours, "ms")
    for name, trial in reversed(names.items()):
        seconds(trial.theirs, 1)
        yield Figure(f"gated delta, {name}, mlx-lm's own code", 1000 * seconds(trial.theirs, 1), "ms")
    off = mx.abs(prompt.ours().flatten().astype(mx.float32) - prompt.theirs().flatten().astype(mx.float32)).max()
    yield Figure("gated delta, largest difference from mlx-lm's", float(off), "")


def _median(trial: Trial, scale: Scale) -> float:
    seconds(trial.paged, 1)
    return statistics.median(seconds(trial.paged, scale.repeats) for _ in range(ROUNDS))
