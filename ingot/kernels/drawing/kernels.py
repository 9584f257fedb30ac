"""A token for each row of logits, in one launch, for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx

from ingot.kernels.gpu.launchers import Launcher
from ingot.kernels.gpu.texts import Kernel, Output, Work, read

SOURCE = Path(__file__).parents[1] / "sampling" / "source"
THREADS = 1024
Draw = tuple[float, int, float, float, float]
"""Of a row: a temperature (0: the likeliest token is taken), top-k (0: all), top-p, min-p, and a number in [0, 1)."""


@cache
def drawing_kernel() -> Kernel:
    return Kernel("drawing", "draw", ("logits", "how"), ("tokens",), read(SOURCE / "sums.h"), read(SOURCE / "draw.h"))


def draw(run: Launcher, logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Of logits [rows, vocab] (float32), by a draw for each row: [rows] (uint32). Of the likeliest top-k those stay
    that together hold top-p of their weight, of all tokens those that weigh as much as the least of them, and min-p of
    the likeliest at least."""
    work = Work((), (len(draws), 1, 1), THREADS, (Output((len(draws),), mx.int32),))
    [tokens] = run(drawing_kernel(), [mx.contiguous(logits), mx.array([*draws], mx.float32)], work)
    return tokens.view(mx.uint32)
