"""Sampling a token for each row of logits in one launch, for NVIDIA GPUs, where plain operations take thirty. The
kernel is compared with plain operations on the device at hand before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launcher, compile_kernels, kernel_launcher
from ingot.kernels.measured import SAMPLING, slower_parts
from ingot.kernels.selfcheck import attempted

SOURCE = Path(__file__).parent / "source"
THREADS = 1024
RowSampling = tuple[float, int, float, float, float]
"""Of a row: a temperature (0: greedy), top-k (0: all), top-p, min-p, and a random number in [0, 1)."""


@cache
def sampling_kernel() -> Kernel:
    return Kernel(
        "drawing",
        "draw",
        ("logits", "how"),
        ("tokens",),
        read_source(SOURCE / "sums.h"),
        read_source(SOURCE / "draw.h"),
    )


def sample_tokens(run: Launcher, logits: mx.array, draws: Sequence[RowSampling]) -> mx.array:
    """Of logits [rows, vocab] (float32), a token for each row: [rows] (uint32). Of the likeliest top-k those stay that
    together have top-p of their weight, of all tokens those that weigh as much as the least of them, and at least min-p
    of the likeliest."""
    work = LaunchConfig((), (len(draws), 1, 1), THREADS, (OutputSpec((len(draws),), mx.int32),))
    [tokens] = run(sampling_kernel(), [mx.contiguous(logits), mx.array([*draws], mx.float32)], work)
    return tokens.view(mx.uint32)


log = logging.getLogger("ingot.kernels")
SampleTokens = Callable[[mx.array, Sequence[RowSampling]], mx.array]
VOCAB = 5000
CLOSE = 1e-5
"""Of all weight: so near to an edge, either side is right."""


@cache
def checked_sampling(device: Device) -> SampleTokens | None:
    """None where there is no kernel, or where it is wrong, which is logged once. An emulated GPU samples by plain
    operations: a thousand emulated threads a row would take longer than the whole step."""
    run = kernel_launcher(device) if device.kind == "cuda" else None
    if run is None or isinstance(run, Emulator):
        return None
    slower = slower_parts(device)
    if slower.leave_out(SAMPLING):
        log.warning("%s", slower.notes[-1])
        return None
    sample = partial(sample_tokens, run)
    compile_kernels(device, lambda run: sample_tokens(run, mx.zeros((1, 2)), [(0.0, 0, 1.0, 0.0, 0.0)]))
    wrong = check_sampling(sample)
    if wrong is not None:
        log.warning("tokens are sampled by plain operations, which is slower: the kernel %s", wrong)
        return None
    return sample


def check_sampling(sample: SampleTokens) -> str | None:
    """What is wrong with sampled tokens; None where they are right."""
    filters = ((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.9, 0.0), (0, 1.0, 0.05), (64, 0.95, 0.02))
    draws = [(0.0, 0, 1.0, 0.0, 0.5), *((0.7, *each, at) for each in filters for at in (0.01, 0.5, 0.999))]
    logits = 2 * mx.random.normal((len(draws), VOCAB), key=mx.random.key(3))

    def wrong() -> str | None:
        tokens: list[int] = sample(logits, draws).tolist()  # type: ignore[assignment]
        each = zip(draws, logits, tokens, strict=True)
        return next((f"samples wrongly by {how}" for how, row, token in each if not _is_right(row, how, token)), None)

    return attempted(wrong)


def _is_right(logits: mx.array, how: RowSampling, token: int) -> bool:
    """Whether the cumulative sum of what the filters keep passes the random number at this token, wherever rounding
    puts edges."""
    temperature, top_k, top_p, min_p, at = how
    if temperature == 0:
        return token == mx.argmax(logits).item()
    weights = np.array(mx.exp((logits - logits.max()) / temperature)).astype(np.float64)
    falling = np.sort(weights)[::-1][: top_k or None]
    before = np.cumsum(falling) - falling
    for nudge in (0.0, CLOSE, -CLOSE):
        stays = before < (top_p + nudge) * falling.sum()
        kept = np.where(weights >= max(falling[stays].min(), min_p * (1 + nudge)), weights, 0.0)
        running = np.cumsum(kept) / kept.sum()
        own = kept[token] / kept.sum()
        if own > 0 and running[token] - own - CLOSE <= at <= running[token] + CLOSE:
            return True
    return False
