"""Which launches a model computes rightly, found out at load by running it.

Model code differs in what it makes of caches: some takes a single number for a position, some ignores that a row is
padded. So a few tokens are computed as one plain prompt, then as rows of a batch, and the logits are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Protocol

import mlx.core as mx

from ingot.cache.launch import Part, Row
from ingot.cache.rows import Rows
from ingot.errors import ModelError

Fed = tuple[Row, list[int]]


class Forward(Protocol):
    def __call__(
        self, rows: Rows, tokens: mx.array, parts: Sequence[Part], at: Sequence[int] | None, /, *, mixed: bool
    ) -> mx.array: ...


LONG, SHORT = [5, 17, 3, 29, 11, 23, 7, 19, 2], [13, 31, 8]
"""Two prompts, unlike in tokens and far apart in length."""
FURTHER = [*SHORT, 5]
"""The short one and what it is continued with."""

CLOSE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 2e-2}
"""Logits this close, in parts of their range, differ by rounding alone."""

WRONG = {mx.float32: 0.1, mx.float16: 0.3, mx.bfloat16: 0.3}
"""Logits this far apart do not."""

NOISE = 3
"""Between the two, what counts is how much a model rounds, as when its router wavers: this many times that is close."""


@dataclass(frozen=True)
class Findings:
    """What a probe learned. `rows` have held a prompt, so that every state knows its shape."""

    rows: Rows
    vocab: int
    ragged: bool  # rows of different lengths may decode together, as one launch
    mixed: bool  # launches of any kind may share one forward pass


class Probe:
    def __init__(self, forward: Forward, new_rows: Callable[[], Rows], dtype: mx.Dtype, *, unlike: bool) -> None:
        """`unlike` is False for a model known to go wrong when rows of different lengths share a forward pass."""
        self._forward, self._new_rows, self._dtype, self._unlike = forward, new_rows, dtype, unlike

    def run(self) -> Findings:
        """Raises ModelError if the model does not run here, or if its answer depends on how its prompt is cut."""
        rows, expected = self._plain
        ways = [(True, True), (False, True), (True, False)] if self._unlike else []
        right = (way for way in ways if self._agrees(partial(self._beside, ragged=way[0], mixed=way[1])))
        ragged, mixed = next(right, (False, False))
        if not ragged and not mixed and self._rounding > WRONG[self._dtype]:
            raise ModelError("The model's answer depends on how its prompt is cut: it cannot be right")
        return Findings(rows, expected.shape[-1], ragged, mixed)

    @cached_property
    def _plain(self) -> tuple[Rows, mx.array]:
        """Each prompt in one launch of its own: the rows of the long one, and logits [3, vocab]."""
        try:
            rows = self._new_rows()
            made = [rows, self._new_rows(), self._new_rows()]
            prompts = zip(made, (LONG, SHORT, FURTHER), strict=True)
            logits = mx.concatenate([self._launch(kept, [(kept.new(), prompt)]) for kept, prompt in prompts])
        except ModelError:
            raise
        # Code of any family may fail in any way, on a device it was not written for mostly.
        except Exception as error:
            raise ModelError(f"The model cannot be run here: {error}") from error
        if mx.any(mx.isnan(logits)).item():
            raise ModelError("The model answers with logits that are not numbers")
        return rows, logits

    @cached_property
    def _rounding(self) -> float:
        """How far logits move when a prompt is cut into several launches."""
        return self._cut(LONG, self._plain[1][:1], mixed=False)

    @cached_property
    def _arithmetic(self) -> float:
        """The same where attention is ours, which adds and rounds in another order: nobody is beside the prompt."""
        prompts = enumerate((LONG, SHORT, FURTHER))
        try:
            moved = max(self._cut(prompt, self._plain[1][at : at + 1], mixed=True) for at, prompt in prompts)
        except Exception:  # of a model that takes no mixed launches, in whatever way
            return 0.0
        return moved if moved < WRONG[self._dtype] / 2 else 0.0

    def _cut(self, prompt: list[int], expected: mx.array, *, mixed: bool) -> float:
        rows = self._new_rows()
        row = rows.new()
        for piece in (prompt[:2], prompt[2:-1], prompt[-1:]):
            if piece:
                logits = self._run(rows, [[(row, piece)]], mixed=mixed)
        return apart(logits, expected)

    def _agrees(self, trial: Callable[[], mx.array]) -> bool:
        try:
            gap = apart(trial(), self._plain[1])
        # Whatever it is that a model cannot do with rows unlike each other, the answer is the same.
        except Exception:
            return False
        if CLOSE[self._dtype] < gap < WRONG[self._dtype]:
            return gap <= NOISE * max(self._rounding, self._arithmetic)
        return gap <= CLOSE[self._dtype]

    def _beside(self, *, ragged: bool, mixed: bool) -> mx.array:
        """Two prompts at once, then the short one decoding beside the long one, then both decoding: as one launch where
        they are `ragged`, and all that runs at once in one forward pass where launches are `mixed`."""
        rows = self._new_rows()
        short, long = rows.new(), rows.new()
        run = self._mixed if mixed else self._apart
        run(rows, [[(short, SHORT[:-1])], [(long, LONG[:4])]])
        first = run(rows, [[(short, SHORT[-1:])], [(long, LONG[4:-1])]])[0]
        last = [(short, FURTHER[-1:]), (long, LONG[-1:])]
        both = run(rows, [last] if ragged else [[each] for each in last])
        return mx.stack([both[1], first, both[0]])

    def _apart(self, rows: Rows, parts: list[list[Fed]]) -> mx.array:
        return mx.concatenate([self._launch(rows, part) for part in parts])

    def _mixed(self, rows: Rows, parts: list[list[Fed]]) -> mx.array:
        return self._run(rows, parts, mixed=True)

    def _launch(self, rows: Rows, part: list[Fed]) -> mx.array:
        return self._run(rows, [part], mixed=False)

    def _run(self, rows: Rows, parts: list[list[Fed]], *, mixed: bool) -> mx.array:
        """Logits [rows, vocab] after each row's last token."""
        tokens = [token for part in parts for _, fed in part for token in fed]
        ends = list(accumulate(len(fed) for part in parts for _, fed in part))
        asked = [Part(tuple(row for row, _ in part), len(part[0][1])) for part in parts]
        logits = self._forward(rows, mx.array(tokens), asked, [end - 1 for end in ends], mixed=mixed)
        mx.eval(logits, rows.pending())
        if logits.shape[0] != len(ends):
            raise ModelError(f"The model answers with logits of shape {logits.shape}; ingot expects one row a token")
        return logits


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
