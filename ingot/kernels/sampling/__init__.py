"""Draws that were compared with plain ones on the device at hand before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial

import mlx.core as mx
import numpy as np

from ingot.kernels.device import Device
from ingot.kernels.drawing.kernels import Draw, draw
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launchers import Launcher, launcher, prepare

log = logging.getLogger("ingot.kernels")
Drawing = Callable[[mx.array, Sequence[Draw]], mx.array]
VOCAB = 5000
CLOSE = 1e-5
"""Of all weight: as near to an edge either side is right."""


@cache
def checked_drawing(device: Device) -> Drawing | None:
    """None where there is no kernel, or where it is wrong, which is said once. An emulated GPU draws by plain
    operations: a thousand emulated threads a row would take longer than all the rest of a step."""
    run = launcher(device) if device.kind == "cuda" else None
    if run is None or isinstance(run, Emulator):
        return None
    drawing = partial(draw, run)
    prepare(device, rehearse)
    wrong = selfcheck(drawing)
    if wrong is not None:
        log.warning("tokens are drawn by plain operations, slower: a kernel %s", wrong)
        return None
    return drawing


def rehearse(run: Launcher) -> None:
    """Launches what will be launched."""
    draw(run, mx.zeros((1, 2)), [(0.0, 0, 1.0, 0.0, 0.0)])


def selfcheck(drawing: Drawing) -> str | None:
    """What is wrong with draws; None where they are right."""
    draws = [(0.0, 0, 1.0, 0.0, 0.5), *_drawn()]
    logits = 2 * mx.random.normal((len(draws), VOCAB), key=mx.random.key(3))
    try:
        tokens: list[int] = drawing(logits, draws).tolist()  # type: ignore[assignment]
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"
    wrong = [how for how, row, token in zip(draws, logits, tokens, strict=True) if not _is_right(row, how, token)]
    return f"draws wrongly by {wrong[0]}" if wrong else None


def _drawn() -> list[Draw]:
    filters = ((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.9, 0.0), (0, 1.0, 0.05), (64, 0.95, 0.02))
    return [(0.7, *each, at) for each in filters for at in (0.01, 0.5, 0.999)]


def _is_right(logits: mx.array, how: Draw, token: int) -> bool:
    """Whether the running sum of what the filters keep passes the draw at this token, wherever rounding puts edges."""
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
