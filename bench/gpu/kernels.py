"""The kernels by themselves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import mlx.core as mx

from bench.gpu.goals import Figure
from bench.gpu.scale import Scale
from ingot.kernels.device import current_device
from ingot.kernels.paged_attention.inputs import order_after
from ingot.kernels.paged_attention.shapes import AttentionShape
from ingot.kernels.recurrent.kernels import RecurrentSpans
from ingot.kernels.recurrent.mixers import DeltaShape, Mamba2Shape, ShortConvShape
from ingot.kernels.recurrent.selfcheck import MixerShape
from ingot.measure.subjects import PagedTrial, RecurrentTrial, work_seconds

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
        trial = PagedTrial(current_device(), shape, alike)
        speeds.append(trial.bytes() / _median(trial, scale) / 1e12)
        beside = trial.bytes() / min(work_seconds(trial.gathered, 1) for _ in range(3)) / 1e12
        yield Figure(f"attention, 8 x 8K, heads of {name}", speeds[-1], "TB/s", beside)
    trial = PagedTrial(current_device(), heads["128"], mixed)
    over = trial.bytes() / _median(trial, scale) / 1e12 / speeds[0]
    yield Figure("attention, 1K to 16K mixed, over alike", over, "x")
    yield from _widths(heads["128"], scale)


def _widths(shape: AttentionShape, scale: Scale) -> Iterator[Figure]:
    trial = PagedTrial(current_device(), shape, [scale.wide_depth] * scale.rows)
    single = _median(trial, scale)
    for width in (4, 8, 16):
        trial.ask(width)
        yield Figure(f"attention, width {width} at 32K, over width 1", _median(trial, scale) / single, "x")


class ChainedTrial(RecurrentTrial):
    """Each launch is behind the one before: a device would run several at once, which those of a model never do."""

    def __init__(self, shape: MixerShape, rows: int, tokens: int) -> None:
        super().__init__(current_device(), shape, rows, tokens)
        self._last = mx.zeros(1)

    def mixed(self) -> mx.array:
        return self._chained(lambda spans: self.kernels.mix(self.joint, spans, self.states, *self.apart)[0])

    def convolved(self) -> mx.array:
        return self._chained(lambda spans: self.kernels.convolve(self.joint, spans, self.states[0])[0])

    def read(self) -> mx.array:
        """By the rule alone, of what was not convolved."""
        given = mx.zeros((self.rows * self.tokens, self.shape.convolution.channels), mx.bfloat16)
        return self._chained(
            lambda spans: self.kernels.advance(given, self.joint, spans, self.states[1], *self.apart)[0]
        )

    def _chained(self, launch: Callable[[RecurrentSpans], mx.array]) -> mx.array:
        self._last = launch(replace(self.spans, spans=order_after(self.spans.spans, self._last)))
        return self._last

    def bytes(self) -> int:
        """Of states that are read and written."""
        return 2 * sum(part.nbytes for part in self.states)


def _delta_trial(scale: Scale, rows: int, tokens: int) -> ChainedTrial:
    """A layer of Qwen 3.5's."""
    return ChainedTrial(DeltaShape(1, 2, 32, 32, 4) if scale.tiny else DeltaShape(16, 32, 128, 128, 4), rows, tokens)


def delta(scale: Scale) -> Iterator[Figure]:
    """Milliseconds of a prompt's piece and of a step, and what mlx-lm's own code takes."""
    prompt, step = _delta_trial(scale, 1, scale.tokens), _delta_trial(scale, 4 if scale.tiny else 32, 1)
    names = {"2,048 tokens of a layer": prompt, "a step of 32 rows": step}
    for name, trial in names.items():  # all of ours first: theirs may take longer than there is time
        yield Figure(f"gated delta, {name}", _milliseconds(trial.mixed, scale), "ms")
    for name, trial in reversed(names.items()):
        work_seconds(trial.theirs, 1)
        yield Figure(f"gated delta, {name}, mlx-lm's own code", 1000 * work_seconds(trial.theirs, 1), "ms")
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
            trial = ChainedTrial(shape, rows, 1)
            took = _milliseconds(trial.mixed, scale)
            yield Figure(
                f"{name}, a step of {rows} rows", took, f"ms ({trial.bytes() / took / 1e9:.2f} TB/s of states)"
            )
        trial = ChainedTrial(shape, 1, scale.tokens)
        yield Figure(f"{name}, {scale.tokens:,} tokens of a layer", _milliseconds(trial.mixed, scale), "ms")
        yield Figure(f"{name}, {scale.tokens:,} tokens, convolved", _milliseconds(trial.convolved, scale), "ms")
        if len(shape.states) > 1:
            yield Figure(f"{name}, {scale.tokens:,} tokens, read", _milliseconds(trial.read, scale), "ms")


def _milliseconds(work: Callable[[], mx.array], scale: Scale) -> float:
    work_seconds(work, 1)
    return 1000 * statistics.median(work_seconds(work, scale.repeats) for _ in range(ROUNDS))


def _median(trial: PagedTrial, scale: Scale) -> float:
    work_seconds(trial.paged, 1)
    return statistics.median(work_seconds(trial.paged, scale.repeats) for _ in range(ROUNDS))
