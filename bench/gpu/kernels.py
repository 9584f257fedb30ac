"""The kernels by themselves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from bench.gpu.goals import Figure
from bench.gpu.scale import Scale
from bench.paged import Trial, seconds
from ingot.kernels.device import current_device
from ingot.kernels.paged_attention.inputs import order_after
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.kernels.recurrent.gated_delta import DeltaShape
from ingot.kernels.recurrent.kernels import RecurrentSpans
from ingot.kernels.recurrent.mamba2 import Mamba2Shape
from ingot.kernels.recurrent.selfcheck import MixerShape, random_weights, recurrent_kernels
from ingot.kernels.recurrent.short_conv import ShortConvShape
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


class RecurrentTrial:
    """A layer's recurrent mixer, without the products around it."""

    def __init__(self, shape: MixerShape, rows: int, tokens: int) -> None:
        self.shape, self.rows, self.tokens = shape, rows, tokens
        self.weights = random_weights(shape, np.random.default_rng(0))
        self.joint, *self.apart = (
            mx.random.normal((rows * tokens, width)).astype(mx.bfloat16) for width in (shape.width, *shape.apart)
        )
        self.states = [mx.zeros((rows, *sizes)) for sizes in shape.states]
        self.kernels: Any = recurrent_kernels(current_device(), shape, mx.bfloat16, self.weights)
        self._spans = RecurrentSpans.of([(row * tokens, tokens, row, 0) for row in range(rows)])
        self._last = mx.zeros(1)
        mx.eval(self.weights, self.joint, self.apart, self.states)

    def mixed(self) -> mx.array:
        return self._chained(lambda spans: self.kernels.mix(self.joint, spans, self.states, *self.apart)[0])

    def convolved(self) -> mx.array:
        return self._chained(lambda spans: self.kernels.convolve(self.joint, spans, self.states[0])[0])

    def read(self) -> mx.array:
        """By the rule alone, of what was not convolved."""
        rule = self.kernels.advance if isinstance(self.shape, DeltaShape) else self.kernels.scan
        given = mx.zeros((self.rows * self.tokens, self.shape.convolution.channels), mx.bfloat16)
        return self._chained(lambda spans: rule(given, self.joint, spans, self.states[1], *self.apart)[0])

    def _chained(self, launch: Callable[[RecurrentSpans], mx.array]) -> mx.array:
        """Behind the one before: a device would run several at once, which those of a model never do."""
        spans = replace(self._spans, spans=order_after(self._spans.spans, self._last))
        self._last = launch(spans)
        return self._last

    def bytes(self) -> int:
        """Of states that are read and written."""
        return 2 * sum(part.nbytes for part in self.states)


class DeltaTrial(RecurrentTrial):
    """A layer of Qwen 3.5's."""

    def __init__(self, scale: Scale, rows: int, tokens: int) -> None:
        self.delta = DeltaShape(1, 2, 32, 32, 4) if scale.tiny else DeltaShape(16, 32, 128, 128, 4)
        super().__init__(self.delta, rows, tokens)

    def ours(self) -> mx.array:
        """What is read of states, behind the convolution."""
        spans = RecurrentSpans.of([(row * self.tokens, self.tokens, row, 0) for row in range(self.rows)])
        convolved, _ = self.kernels.convolve(self.joint, spans, self.states[0])
        read: mx.array = self.kernels.advance(convolved, self.joint, spans, self.states[1])[0]
        return read

    def theirs(self) -> mx.array:
        """The same as mlx-lm's module computes it."""
        shape, gated = self.delta, import_upstream("mlx_lm.models.gated_delta")
        joint, channels = self.joint.reshape(self.rows, self.tokens, -1), shape.convolution.channels
        padded = mx.pad(joint[..., :channels], [(0, 0), (shape.taps - 1, 0), (0, 0)])
        filter = self.weights["filter"].astype(mx.bfloat16)
        x = nn.silu(mx.conv1d(padded, filter, groups=channels))
        keys = shape.key_heads * shape.key_size
        q, k, v = mx.split(x, [keys, 2 * keys], axis=-1)
        q, k = (part.reshape(self.rows, self.tokens, shape.key_heads, shape.key_size) for part in (q, k))
        v = v.reshape(self.rows, self.tokens, shape.value_heads, shape.value_size)
        q, k = gated.normalize_qk(q, k, inv_scale=shape.key_size**-0.5, eps=1e-6)
        b, a = mx.split(joint[..., shape.factors :], 2, axis=-1)
        found: mx.array = gated.gated_delta_update(q, k, v, a, b, self.weights["a_log"], self.weights["dt_bias"])[0]
        return found


def delta(scale: Scale) -> Iterator[Figure]:
    """Milliseconds of a prompt's piece and of a step, and what mlx-lm's own code takes."""
    prompt, step = DeltaTrial(scale, 1, scale.tokens), DeltaTrial(scale, 4 if scale.tiny else 32, 1)
    names = {"2,048 tokens of a layer": prompt, "a step of 32 rows": step}
    for name, trial in names.items():  # all of ours first: theirs may take longer than there is time
        yield Figure(f"gated delta, {name}", _milliseconds(trial.mixed, scale), "ms")
    for name, trial in reversed(names.items()):
        seconds(trial.theirs, 1)
        yield Figure(f"gated delta, {name}, mlx-lm's own code", 1000 * seconds(trial.theirs, 1), "ms")
    off = mx.abs(prompt.ours().flatten().astype(mx.float32) - prompt.theirs().flatten().astype(mx.float32)).max()
    yield Figure("gated delta, largest difference from mlx-lm's", float(off), "")


def recurrent(scale: Scale) -> Iterator[Figure]:
    """Milliseconds of a layer: steps of several rows, a prompt's piece, and of that each kernel by itself."""
    shapes: dict[str, MixerShape] = {
        "Nemotron Nano's scan": Mamba2Shape(128, 8, 80, 128, 4, 1280, biased=True),
        "Granite 4 Small's scan": Mamba2Shape(128, 1, 64, 128, 4, 8192, biased=True),
        "LFM2's convolution": ShortConvShape(2048, 3),
        "gated delta": DeltaShape(16, 32, 128, 128, 4),
        "Kimi's delta attention": DeltaShape(
            *(32, 32, 128, 128, 4), decays_by_key=True, sigmoid_gate=True, gates_apart=True, decays_apart=True
        ),
    }
    if scale.tiny:
        shapes = {"a scan": Mamba2Shape(2, 1, 16, 32, 4, 32), "a convolution": ShortConvShape(40, 3)}
    for name, shape in shapes.items():
        for rows in (1, 2) if scale.tiny else (1, 8, 32):
            trial = RecurrentTrial(shape, rows, 1)
            took = _milliseconds(trial.mixed, scale)
            yield Figure(
                f"{name}, a step of {rows} rows", took, f"ms ({trial.bytes() / took / 1e9:.2f} TB/s of states)"
            )
        trial = RecurrentTrial(shape, 1, scale.tokens)
        yield Figure(f"{name}, {scale.tokens:,} tokens of a layer", _milliseconds(trial.mixed, scale), "ms")
        yield Figure(f"{name}, {scale.tokens:,} tokens, convolved", _milliseconds(trial.convolved, scale), "ms")
        if len(shape.states) > 1:
            yield Figure(f"{name}, {scale.tokens:,} tokens, read", _milliseconds(trial.read, scale), "ms")


def _milliseconds(work: Callable[[], mx.array], scale: Scale) -> float:
    seconds(work, 1)
    return 1000 * statistics.median(seconds(work, scale.repeats) for _ in range(ROUNDS))


def _median(trial: Trial, scale: Scale) -> float:
    seconds(trial.paged, 1)
    return statistics.median(seconds(trial.paged, scale.repeats) for _ in range(ROUNDS))
