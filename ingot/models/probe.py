"""Which launches a model computes rightly, found out at load by running it.

Model code differs in what it makes of caches: some takes a single number for a position, some ignores that a row is
padded. So a few tokens are computed as one plain prompt, then as rows of a batch, and the logits are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import mlx.core as mx

from ingot.cache.layers import LayerState
from ingot.cache.slots import Slots
from ingot.errors import ModelError

Forward = Callable[[mx.array, list[LayerState], Sequence[int] | None], mx.array]

LONG, SHORT = [5, 17, 3, 29, 11, 23, 7, 19, 2], [13, 31, 8]
"""Two prompts, unlike in tokens and far apart in length."""

CLOSE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 2e-2}
"""Logits this close, in parts of their range, differ by rounding alone."""

WRONG = {mx.float32: 0.1, mx.float16: 0.3, mx.bfloat16: 0.3}
"""Logits this far apart do not."""

NOISE = 3
"""Between the two, what counts is how much a model rounds, as when its router wavers: this many times that is close."""


@dataclass(frozen=True)
class Findings:
    """What a probe learned. `slots` have held a prompt, so that every state knows its shape."""

    slots: Slots
    vocab: int
    ragged: bool  # rows of different lengths may decode together
    padded: bool  # prompts of different lengths, begun or not, may be computed together, padded on the right
    mixed: bool  # launches of any kind may share one forward pass


class Probe:
    def __init__(
        self,
        forward: Forward,
        forward_mixed: Forward,
        new_slots: Callable[[], Slots],
        dtype: mx.Dtype,
        *,
        unlike: bool,
        mixing: bool,
    ) -> None:
        """`unlike` is False for a model known to go wrong when rows of different lengths share a launch, `mixing`
        where several launches cannot share a forward pass, whatever the model."""
        self._forward, self._forward_mixed, self._new_slots = forward, forward_mixed, new_slots
        self._dtype, self._unlike, self._mixing = dtype, unlike, mixing

    def run(self) -> Findings:
        """Raises ModelError if the model does not run here, or if its answer depends on how its prompt is cut."""
        slots, expected = self._plain
        padded = self._unlike and self._agrees(self._padded)
        ragged = padded or (self._unlike and self._agrees(self._ragged))
        if not ragged and self._rounding > WRONG[self._dtype]:
            raise ModelError("The model's answer depends on how its prompt is cut: it cannot be right")
        mixed = self._unlike and self._mixing and self._agrees(lambda: self._mixed(ragged))
        return Findings(slots, expected.shape[-1], ragged, padded, mixed)

    @cached_property
    def _plain(self) -> tuple[Slots, mx.array]:
        """Each prompt in one launch of its own: the slots of the long one, and logits [2, vocab]."""
        try:
            slots = self._new_slots()
            logits = mx.concatenate([self._launch(slots, 0, [LONG]), self._launch(self._new_slots(), 0, [SHORT])])
        except ModelError:
            raise
        # Code of any family may fail in any way, on a device it was not written for mostly.
        except Exception as error:
            raise ModelError(f"The model cannot be run here: {error}") from error
        if mx.any(mx.isnan(logits)).item():
            raise ModelError("The model answers with logits that are not numbers")
        return slots, logits

    @cached_property
    def _rounding(self) -> float:
        """How far logits move when a prompt is cut into several launches."""
        slots = self._new_slots()
        for piece in (LONG[:4], LONG[4:-1], LONG[-1:]):
            logits = self._launch(slots, 0, [piece])
        return apart(logits, self._plain[1][:1])

    def _agrees(self, trial: Callable[[], mx.array]) -> bool:
        try:
            gap = apart(trial(), self._plain[1])
        # Whatever it is that a model cannot do with rows unlike each other, the answer is the same.
        except Exception:
            return False
        if CLOSE[self._dtype] < gap < WRONG[self._dtype]:
            return gap <= NOISE * self._rounding
        return gap <= CLOSE[self._dtype]

    def _padded(self) -> mx.array:
        """The rows of a batch: the short one begun, padded, while the long one goes on, then both decoding."""
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

    def _mixed(self, ragged: bool) -> mx.array:
        """Two prompts in one forward pass, then the short one decoding beside the long one, then both decoding."""
        slots = self._two_rows()
        self._launch_mixed(slots, [(0, [SHORT[:-1]]), (1, [LONG[:4]])])
        short = self._launch_mixed(slots, [(0, [SHORT[-1:]]), (1, [LONG[4:-1]])])[0]
        last = [SHORT[:1], LONG[-1:]]
        both = self._launch_mixed(slots, [(0, last)] if ragged else [(0, last[:1]), (1, last[1:])])
        return mx.stack([both[1], short])

    def _launch_mixed(self, slots: Slots, parts: list[tuple[int, list[list[int]]]]) -> mx.array:
        """Logits [rows, vocab] after each row's last token; a part is its first slot and the tokens of its rows."""
        rows = [row for _, part in parts for row in part]
        ends = list(accumulate(len(row) for row in rows))
        tokens = mx.array([token for row in rows for token in row])
        with slots.mixed([(first, len(part), len(part[0])) for first, part in parts]) as layers:
            logits = self._forward_mixed(tokens, layers, [end - 1 for end in ends])
            mx.eval(logits, slots.arrays())
        return logits

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
            raise ModelError(f"The model answers with logits of shape {logits.shape}; ingot expects one row a token")
        return logits[:, 0]


def apart(found: mx.array, expected: mx.array) -> float:
    """The largest difference of two sets of logits [.., vocab], in parts of the expected ones' range.

    Tokens that a model rules out (with a logit of minus infinity) must be the same; what is not a number is infinitely
    far from anything.
    """
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    known = mx.isfinite(expected)
    lowest = mx.min(mx.where(known, expected, mx.inf), axis=-1)
    highest = mx.max(mx.where(known, expected, -mx.inf), axis=-1)
    gaps = mx.where(found == expected, 0, mx.abs(found - expected))
    shares = mx.max(gaps, axis=-1) / (highest - lowest)
    worst = mx.max(mx.where(mx.isfinite(shares), shares, mx.inf)).item()
    assert isinstance(worst, float)
    return worst
