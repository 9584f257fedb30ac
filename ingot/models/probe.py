"""Which launches a model computes rightly, found out at load by running it.

Model code differs in what it makes of caches: some takes a single number for a position, some ignores that a row is
padded. So a few tokens are computed as one plain prompt, then as rows of a batch, and the logits are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ingot.cache.layers import LayerState, Slots
from ingot.errors import ModelError

Forward = Callable[[mx.array, list[LayerState], Sequence[int] | None], mx.array]

LONG, SHORT = [5, 17, 3, 29, 11, 23, 7, 19, 2], [13, 31, 8]
"""Two prompts, unlike in tokens and far apart in length."""

TOLERANCES = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 6e-2}
"""How far logits may lie apart, in parts of their range, when only the order of additions differs."""

WRONG = 10
"""Logits this many tolerances apart are another answer, whatever was rounded on the way."""


@dataclass(frozen=True)
class Findings:
    """What a probe learned. `slots` have held a prompt, so that every state knows its shape."""

    slots: Slots
    vocab: int
    ragged: bool  # rows of different lengths may decode together
    padded: bool  # prompts of different lengths, begun or not, may be computed together, padded on the right


class Probe:
    def __init__(self, forward: Forward, new_slots: Callable[[], Slots], dtype: mx.Dtype, *, mixing: bool) -> None:
        """`mixing` is False for a model known to go wrong when rows of different lengths share a launch."""
        self._forward, self._new_slots = forward, new_slots
        self._tolerance, self._mixing = TOLERANCES[dtype], mixing

    def run(self) -> Findings:
        """Raises ModelError if the model does not run, or if its answer depends on how its prompt is cut."""
        try:
            slots, long = self._alone(LONG)
            _, short = self._alone(SHORT)
            expected = mx.concatenate([long, short])
        # Code of any family may fail in any way, on a device it was not written for mostly.
        except Exception as error:
            raise ModelError(f"The model cannot be run here: {error}") from error
        if not mx.all(mx.isfinite(mx.max(expected, axis=-1))).item():
            raise ModelError("The model answers with numbers that are not finite")
        padded = self._mixing and self._agrees(self._padded, expected)
        ragged = padded or (self._mixing and self._agrees(self._ragged, expected))
        if not ragged:
            self._refuse_if_cutting_matters(long)
        return Findings(slots, expected.shape[-1], ragged, padded)

    def _alone(self, tokens: list[int]) -> tuple[Slots, mx.array]:
        slots = self._new_slots()
        return slots, self._launch(slots, 0, [tokens])

    def _padded(self) -> mx.array:
        """The rows of a batch, the short one begun while the long one goes on, padded, then both decoding."""
        slots = self._two_rows()
        self._launch(slots, 0, [LONG[:4]])
        self._launch(slots, 0, [LONG[4:-1], SHORT[:-1]])
        return self._launch(slots, 0, [LONG[-1:], SHORT[-1:]])

    def _ragged(self) -> mx.array:
        """Each row computed on its own, then both decoding together."""
        slots = self._two_rows()
        self._launch(slots, 0, [LONG[:-1]])
        self._launch(slots, 1, [SHORT[:-1]])
        return self._launch(slots, 0, [LONG[-1:], SHORT[-1:]])

    def _cut(self) -> mx.array:
        slots = self._new_slots()
        self._launch(slots, 0, [LONG[:4]])
        self._launch(slots, 0, [LONG[4:-1]])
        return self._launch(slots, 0, [LONG[-1:]])

    def _two_rows(self) -> Slots:
        slots = self._new_slots()
        slots.resize(2, slots.capacity)
        return slots

    def _launch(self, slots: Slots, first: int, rows: list[list[int]]) -> mx.array:
        """Logits [rows, vocab] after each row's last token."""
        counts = [len(row) for row in rows]
        width = max(counts)
        tokens = mx.array([row + [0] * (width - len(row)) for row in rows])
        with slots.launch(first, len(rows), width, counts) as layers:
            logits = self._forward(tokens, layers, [count - 1 for count in counts])
            mx.eval(logits, slots.arrays())
        if logits.shape[:2] != (len(rows), 1):
            raise ModelError(f"it answers with logits of shape {logits.shape}")
        return logits[:, 0]

    def _agrees(self, trial: Callable[[], mx.array], expected: mx.array) -> bool:
        try:
            found = trial()
        # Whatever it is that a model cannot do with rows unlike each other, the answer is the same.
        except Exception:
            return False
        return apart(found, expected) <= self._tolerance

    def _refuse_if_cutting_matters(self, long: mx.array) -> None:
        if apart(self._cut(), long) > WRONG * self._tolerance:
            raise ModelError("The model's answer depends on how its prompt is cut; it cannot be right for both")


def apart(found: mx.array, expected: mx.array) -> float:
    """The largest difference of two sets of logits, in parts of the expected ones' range; nan is as far as it gets."""
    known = mx.isfinite(expected)
    lowest = mx.min(mx.where(known, expected, mx.inf), axis=-1)
    highest = mx.max(mx.where(known, expected, -mx.inf), axis=-1)
    gaps = mx.where(found == expected, 0, mx.abs(found - expected)).astype(mx.float32)
    share = mx.max(gaps, axis=-1) / (highest - lowest).astype(mx.float32)
    worst: float = mx.max(share).item()
    return worst if mx.all(mx.isfinite(share)).item() else float("inf")
