"""Which forward batches a model computes rightly, found out at load by running it.

Model code differs in what it makes of caches: some takes a single number for a position, some ignores that a row is
padded. So a few tokens are computed as one plain prompt, then as rows of a batch, and the logits are compared. They are
compared as numbers: with how far rounding alone moves the model's own answer, and where a router wavers between
experts, with the choice of experts fixed. No model is refused for its numbers; what cannot be told is run plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import mlx.core as mx

from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.errors import ModelError

RowTokens = tuple[Row, list[int]]


class ForwardFunction(Protocol):
    def __call__(
        self,
        rows: BatchState,
        tokens: mx.array,
        parts: Sequence[ForwardPart],
        at: Sequence[int] | None,
        /,
        *,
        mixed: bool,
    ) -> mx.array: ...


LONG, SHORT = [5, 17, 3, 29, 11, 23, 7, 19, 2], [13, 31, 8]
"""Two prompts, unlike in tokens and far apart in length."""
FURTHER = [*SHORT, 5]
"""The short one and what it is continued with."""

CLOSE_GAP = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 2e-2}
"""Logits this close, in parts of their range, differ by rounding alone."""

WRONG_GAP = {mx.float32: 0.1, mx.float16: 0.3, mx.bfloat16: 0.3}
"""Logits this far apart do not, unless a router wavers."""

NOISE_FACTOR = 3
"""Between the two, what counts is how far rounding alone moves a model: this many times that is close."""

RunContext = Callable[[], AbstractContextManager[None] | None]
"""None where a model cannot be run so."""


@dataclass(frozen=True)
class ProbeVariants:
    """How else a model can be run, to tell numbers that waver from wrong ones."""

    nudged: RunContext = lambda: None  # what tokens are looked up as is off by one unit in the last place
    given: RunContext = lambda: None  # the choice of experts is given
    original: Callable[[list[int]], mx.array] | None = None  # mlx-lm's own logits [1, vocab] of a prompt


NO_VARIANTS = ProbeVariants()


@dataclass(frozen=True)
class ProbeFindings:
    """What a probe learned. `rows` have held a prompt, so that every state knows its shape."""

    rows: BatchState
    vocab: int
    ragged: bool  # rows of different lengths may decode together, as one launch
    mixed: bool  # launches of any kind may share one forward pass
    moved: float = (
        0.0  # how far rounding alone moves logits, in parts of their range, where nothing could be told of it
    )
    unmixed: str | None = None  # why rows of different lengths are not mixed, where that was tried
    wrong: str | None = None  # how far they are from mlx-lm's own, where that is more than rounding


def is_close_gap(gap: float, moved: float, dtype: mx.Dtype) -> bool:
    """Whether logits that are so far apart are the same but for rounding, which alone moves them so far."""
    return gap <= CLOSE_GAP[dtype] or (gap < WRONG_GAP[dtype] and gap <= NOISE_FACTOR * moved)


class Probe:
    def __init__(
        self,
        forward: ForwardFunction,
        new_batch_state: Callable[[], BatchState],
        dtype: mx.Dtype,
        *,
        unlike: bool,
        doubts: ProbeVariants = NO_VARIANTS,
    ) -> None:
        """`unlike` is False for a model known to go wrong when rows of different lengths share a forward pass."""
        self._forward, self._new_rows, self._dtype, self._unlike = forward, new_batch_state, dtype, unlike
        self._doubts = doubts
        self._unmixed: str | None = None

    def run(self) -> ProbeFindings:
        """Raises ModelError if the model does not run here."""
        rows, expected = self._plain
        ways = [(True, True), (False, True), (True, False)] if self._unlike else []
        ragged, mixed = next((way for way in ways if self._agrees(*way)), (False, False))
        alone = self._unlike and not ragged and not mixed
        moved = self._steady._rounding if alone else 0.0
        return ProbeFindings(
            rows,
            expected.shape[-1],
            ragged,
            mixed,
            moved if moved > CLOSE_GAP[self._dtype] else 0.0,
            self._steady._unmixed or self._unmixed if self._unlike and not mixed else None,
            self._wrong(),
        )

    def _agrees(self, ragged: bool, mixed: bool) -> bool:
        """Whether that way of running rows gives what each gives alone, with the choice of experts given if need be."""
        return self._is_right(ragged, mixed) or (self._steady is not self and self._steady._is_right(ragged, mixed))

    def _wrong(self) -> str | None:
        """How far what is computed here is from what mlx-lm's own code computes over its own caches."""
        if self._doubts.original is None or (gap := self._from_original()) <= WRONG_GAP[self._dtype]:
            return None
        if self._steady is not self:
            return self._steady._wrong()
        moved = max(self._rounding, self._arithmetic)
        return f"answers differ from mlx-lm's own by {gap:.2g} of their range" if gap > NOISE_FACTOR * moved else None

    def _original(self) -> mx.array:
        assert self._doubts.original is not None
        return self._doubts.original(LONG)

    def _from_original(self) -> float:
        try:
            own = self._original()
        except Exception:  # of code that cannot do without our states, in whatever way
            return 0.0
        return logits_gap(self._plain[1][:1], own) if mx.all(mx.isfinite(own)).item() else 0.0

    @cached_property
    def _steady(self) -> Probe:
        """One whose router cannot waver, where this one's may: itself where it does not, or has none."""
        if self._rounding <= CLOSE_GAP[self._dtype] or self._doubts.given() is None:
            return self
        return _FixedExpertsProbe(self._forward, self._new_rows, self._dtype, unlike=self._unlike, doubts=self._doubts)

    @cached_property
    def _plain(self) -> tuple[BatchState, mx.array]:
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
        """How far logits move when a prompt is cut into several launches, or nudged by as little as can be."""
        return max(self._cut(LONG, self._plain[1][:1], mixed=False), self._nudged)

    @cached_property
    def _nudged(self) -> float:
        nudged = self._doubts.nudged()
        if nudged is None:
            return 0.0
        rows = self._new_rows()
        with nudged:
            return logits_gap(self._launch(rows, [(rows.new(), LONG)]), self._plain[1][:1])

    @cached_property
    def _arithmetic(self) -> float:
        """The same where attention is ours, which adds and rounds in another order: nobody is beside the prompt."""
        prompts = enumerate((LONG, SHORT, FURTHER))
        try:
            moved = max(self._cut(prompt, self._plain[1][at : at + 1], mixed=True) for at, prompt in prompts)
        except Exception:  # of a model that takes no mixed launches, in whatever way
            return 0.0
        return moved if moved < WRONG_GAP[self._dtype] / 2 else 0.0

    def _cut(self, prompt: list[int], expected: mx.array, *, mixed: bool) -> float:
        rows = self._new_rows()
        row = rows.new()
        for piece in (prompt[:2], prompt[2:-1], prompt[-1:]):
            if piece:
                logits = self._run(rows, [[(row, piece)]], mixed=mixed)
        return logits_gap(logits, expected)

    def _is_right(self, ragged: bool, mixed: bool) -> bool:
        try:
            gap = logits_gap(self._beside(ragged=ragged, mixed=mixed), self._plain[1])
        # Whatever it is that a model cannot do with rows unlike each other, the answer is the same.
        except Exception as error:
            self._unmixed = self._unmixed or f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            return False
        if is_close_gap(gap, 0, self._dtype):
            return True
        self._unmixed = self._unmixed or f"logits differ by {gap:.2g} of their range"
        return gap < WRONG_GAP[self._dtype] and is_close_gap(gap, max(self._rounding, self._arithmetic), self._dtype)

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

    def _apart(self, rows: BatchState, parts: list[list[RowTokens]]) -> mx.array:
        return mx.concatenate([self._launch(rows, part) for part in parts])

    def _mixed(self, rows: BatchState, parts: list[list[RowTokens]]) -> mx.array:
        return self._run(rows, parts, mixed=True)

    def _launch(self, rows: BatchState, part: list[RowTokens]) -> mx.array:
        return self._run(rows, [part], mixed=False)

    def _run(self, rows: BatchState, parts: list[list[RowTokens]], *, mixed: bool) -> mx.array:
        """Logits [rows, vocab] after each row's last token."""
        tokens = [token for part in parts for _, fed in part for token in fed]
        ends = list(accumulate(len(fed) for part in parts for _, fed in part))
        asked = [ForwardPart(tuple(row for row, _ in part), len(part[0][1])) for part in parts]
        logits = self._forward(rows, mx.array(tokens), asked, [end - 1 for end in ends], mixed=mixed)
        mx.eval(logits, rows.pending())
        if logits.shape[0] != len(ends):
            raise ModelError(f"The model answers with logits of shape {logits.shape}; ingot expects one row a token")
        return logits


class _FixedExpertsProbe(Probe):
    """The same model, whose experts are given."""

    @cached_property
    def _steady(self) -> Probe:
        return self

    def _original(self) -> mx.array:
        with self._choice():
            return super()._original()

    def _run(self, rows: BatchState, parts: list[list[RowTokens]], *, mixed: bool) -> mx.array:
        with self._choice():
            return super()._run(rows, parts, mixed=mixed)

    def _choice(self) -> AbstractContextManager[None]:
        given = self._doubts.given()
        assert given is not None
        return given


def logits_gap(found: mx.array, expected: mx.array) -> float:
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
