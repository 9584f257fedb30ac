"""Draws that were compared with plain ones on the device at hand before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.drawing.kernels import Draw, draw
from ingot.kernels.gpu.launchers import launcher, prepare

log = logging.getLogger("ingot.kernels")
Drawing = Callable[[mx.array, Sequence[Draw]], mx.array]
VOCAB = 5000
CLOSE = 1e-5
"""Of all weight: as near to an edge either side is right."""


@cache
def checked_drawing(device: Device) -> Drawing | None:
    """None where there is no kernel, or where it is wrong, which is said once."""
    run = launcher(device) if device.kind == "cuda" else None
    if run is None:
        return None
    wrong = selfcheck(device, partial(draw, run))
    if wrong is not None:
        log.warning("tokens are drawn by plain operations, slower: a kernel %s", wrong)
        return None
    return partial(draw, run)


def selfcheck(device: Device, drawing: Drawing) -> str | None:
    """What is wrong with draws on this device; None where they are right. Compiles the kernel."""
    draws = [(0.0, 0, 1.0, 0.0, 0.5), *_drawn()]
    logits = 2 * mx.random.normal((len(draws), VOCAB), key=mx.random.key(3))
    try:
        prepare(device, lambda run: draw(run, logits, draws))
        tokens: list[int] = drawing(logits, draws).tolist()  # type: ignore[assignment]
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"
    wrong = [how for how, row, token in zip(draws, logits, tokens, strict=True) if not _is_right(row, how, token)]
    return f"draws wrongly by {wrong[0]}" if wrong else None


def _drawn() -> list[Draw]:
    filters = ((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.9, 0.0), (0, 1.0, 0.05), (64, 0.95, 0.02))
    return [(0.7, *each, at) for each in filters for at in (0.01, 0.5, 0.999)]


def _is_right(logits: mx.array, how: Draw, token: int) -> bool:
    """Whether the running sum of what the filters keep passes the draw at this token."""
    temperature, top_k, top_p, min_p, at = how
    if temperature == 0:
        return token == mx.argmax(logits).item()
    weights = mx.exp((logits - logits.max()) / temperature)
    falling = -mx.sort(-weights)[: top_k or None]
    before = mx.cumsum(falling) - falling
    kept = before < top_p * falling.sum() + CLOSE
    least = max(mx.where(kept, falling, mx.inf).min().item(), min_p)  # type: ignore[type-var]
    weights = mx.where(weights >= least, weights, 0.0)
    running = mx.cumsum(weights)
    goal, slack = at * running[-1].item(), CLOSE * running[-1].item() + falling[-1].item() * bool(top_k or top_p < 1)  # type: ignore[operator]
    own, there = weights[token].item(), running[token].item()
    return bool(own > 0 and there - own - slack <= goal <= there + slack)  # type: ignore[operator]
