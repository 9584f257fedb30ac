"""The kernels by themselves."""

from __future__ import annotations

import argparse
import statistics

from bench.gpu.goals import Figure
from bench.gpu.scale import Scale
from bench.paged import Trial, seconds
from ingot.kernels.device import current
from ingot.kernels.paged.kernels import Shape

UNCUT = argparse.Namespace(stretch=None, warps=None, most=None, run=None)
ROUNDS = 5


def attention(scale: Scale) -> list[Figure]:
    """Bytes of keys and values over the time, beside pages gathered for MLX's own attention."""
    heads = (
        (Shape(4, 2, 16, 16), Shape(4, 2, 32, 32)) if scale.tiny else (Shape(32, 8, 128, 128), Shape(16, 2, 256, 256))
    )
    alike = [scale.depth] * scale.rows
    mixed = [
        scale.depth // 8 + (2 * scale.depth - scale.depth // 8) * row // (scale.rows - 1) for row in range(scale.rows)
    ]
    figures, speeds = [], []
    for name, shape in zip(("128", "256"), heads, strict=True):
        trial = Trial(current(), shape, alike, UNCUT)
        speeds.append(trial.bytes() / _median(trial, scale) / 1e12)
        beside = trial.bytes() / min(seconds(trial.gathered, 1) for _ in range(3)) / 1e12
        figures.append(Figure(f"attention, 8 x 8K, heads of {name}", speeds[-1], "TB/s", beside))
    trial = Trial(current(), heads[0], mixed, UNCUT)
    over = trial.bytes() / _median(trial, scale) / 1e12 / speeds[0]
    return [*figures, Figure("attention, 1K to 16K mixed, over alike", over, "x"), *_widths(heads[0], scale)]


def _widths(shape: Shape, scale: Scale) -> list[Figure]:
    trial = Trial(current(), shape, [scale.wide_depth] * scale.rows, UNCUT)
    single = _median(trial, scale)
    found = []
    for width in (4, 8):
        trial.ask(width)
        found.append(Figure(f"attention, width {width} at 32K, over width 1", _median(trial, scale) / single, "x"))
    return found


def _median(trial: Trial, scale: Scale) -> float:
    seconds(trial.paged, 1)
    return statistics.median(seconds(trial.paged, scale.repeats) for _ in range(ROUNDS))
