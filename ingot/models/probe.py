"""Which forward batches a model computes correctly, found at load by running it.

Model code differs in how it uses caches: some takes a single number as a position, some ignores that a row is padded.
So a few tokens are computed as one plain prompt, then as rows of a batch, and the logits are compared. Differences are
judged by how far rounding alone moves the model's own logits, and where a router wavers between experts, with the
choice of experts fixed. No model is refused for its numbers; where nothing can be concluded, sequences run separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
"""Two prompts of different tokens and lengths."""
CONTINUED = [*SHORT, 5]
"""The short one and its next token."""

CLOSE_GAP = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 2e-2}
"""Logits this close, as a share of their range, differ by rounding alone."""

WRONG_GAP = {mx.float32: 0.1, mx.float16: 0.3, mx.bfloat16: 0.3}
"""Logits this far apart do not, unless a router wavers."""

NOISE_FACTOR = 3
"""Between the two, logits are close if they differ by no more than this many times what rounding alone moves them."""

RunContext = Callable[[], AbstractContextManager[None] | None]
"""None where a model cannot be run so."""


@dataclass(frozen=True)
class ProbeVariants:
    """Other conditions to run a model in, to tell rounding from errors."""

    nudged: RunContext = lambda: None  # embeddings are off by one unit in the last place
    fixed_experts: RunContext = lambda: None  # all tokens go to the same expert
    original: Callable[[list[int]], mx.array] | None = None  # mlx-lm's own logits [1, vocab] of a prompt


NO_VARIANTS = ProbeVariants()


@dataclass(frozen=True)
class ProbeFindings:
    """The result of a probe. `rows` have held a prompt, so that every state has its shape."""

    rows: BatchState
    vocab: int
    ragged: bool  # rows of different lengths may decode together, as one part
    mixed: bool  # parts of any kind may share one forward pass
    rounding: float = 0.0  # how far rounding alone moves logits, as a share of their range, if too far to conclude
    unmixed: str | None = None  # why rows of different lengths are not mixed, where that was tried
    wrong: str | None = None  # how far logits are from mlx-lm's own, where that is more than rounding


def is_close_gap(gap: float, rounding: float, dtype: mx.Dtype) -> bool:
    """Whether logits with this gap are the same but for rounding, which alone moves them so far."""
    return gap <= CLOSE_GAP[dtype] or (gap < WRONG_GAP[dtype] and gap <= NOISE_FACTOR * rounding)


class Probe:
    def __init__(
        self,
        forward: ForwardFunction,
        new_batch_state: Callable[[], BatchState],
        dtype: mx.Dtype,
        *,
        unlike: bool,
        in_chunks: bool = False,
        variants: ProbeVariants = NO_VARIANTS,
        run_context: RunContext = nullcontext,
    ) -> None:
        """`unlike` is False for a model known to go wrong when rows of different lengths share a forward pass;
        `in_chunks` is True for one whose own code may give a prompt's tokens other logits in other chunks."""
        self._forward, self._new_rows, self._dtype, self._unlike = forward, new_batch_state, dtype, unlike
        self._in_chunks = in_chunks
        self._variants, self._run_context = variants, run_context
        self._unmixed: str | None = None

    def run(self) -> ProbeFindings:
        """Raises ModelError if the model does not run here."""
        rows, expected = self._separate
        kinds = [(True, True), (False, True), (True, False)] if self._unlike else []
        ragged, mixed = next((kind for kind in kinds if self._agrees(*kind)), (False, False))
        alone = self._unlike and not ragged and not mixed
        rounding = self._steady._rounding if alone else 0.0
        return ProbeFindings(
            rows,
            expected.shape[-1],
            ragged,
            mixed,
            rounding if rounding > CLOSE_GAP[self._dtype] else 0.0,
            self._steady._unmixed or self._unmixed if self._unlike and not mixed else None,
            self._wrong(),
        )

    def _agrees(self, ragged: bool, mixed: bool) -> bool:
        """Whether rows in such batches give what each gives alone, with the choice of experts fixed if need be."""
        return self._is_right(ragged, mixed) or (self._steady is not self and self._steady._is_right(ragged, mixed))

    def _wrong(self) -> str | None:
        """How far logits here are from those of mlx-lm's own code over its own caches."""
        if self._variants.original is None or (gap := self._original_gap()) <= WRONG_GAP[self._dtype]:
            return None
        if self._steady is not self:
            return self._steady._wrong()
        moved = max(self._rounding, self._arithmetic)
        return f"answers differ from mlx-lm's own by {gap:.2g} of their range" if gap > NOISE_FACTOR * moved else None

    def _original_gap(self) -> float:
        assert self._variants.original is not None
        try:
            with self._run_context() or nullcontext():
                own = self._variants.original(LONG)
        except Exception:  # of code that cannot do without our states, in whatever way
            return 0.0
        return logits_gap(self._separate[1][:1], own) if mx.all(mx.isfinite(own)).item() else 0.0

    @cached_property
    def _steady(self) -> Probe:
        """A probe with fixed experts where this model's router may waver; else this one."""
        fixed = self._variants.fixed_experts
        is_fixed = self._run_context is fixed
        if is_fixed or self._rounding <= CLOSE_GAP[self._dtype] or fixed() is None:
            return self
        return Probe(
            *(self._forward, self._new_rows, self._dtype),
            unlike=self._unlike,
            in_chunks=self._in_chunks,
            variants=self._variants,
            run_context=fixed,
        )

    @cached_property
    def _separate(self) -> tuple[BatchState, mx.array]:
        """Each prompt in a batch of its own: the rows of the long one, and logits [3, vocab]."""
        try:
            batches = [self._new_rows() for _ in range(3)]
            prompts = zip(batches, (LONG, SHORT, CONTINUED), strict=True)
            logits = mx.concatenate([self._run_part(rows, [(rows.new(), prompt)]) for rows, prompt in prompts])
        except ModelError:
            raise
        # Code of any family may fail in any way, on a device it was not written for mostly.
        except Exception as error:
            needs_metal = str(error).startswith("[metal_kernel]")
            why = "its family's code has a kernel for Apple GPUs (Metal) alone" if needs_metal else error
            raise ModelError(f"The model cannot be run here: {why}") from error
        if mx.any(mx.isnan(logits)).item():
            raise ModelError("The model answers with logits that are not numbers")
        return batches[0], logits

    @cached_property
    def _separate_in_chunks(self) -> mx.array:
        """The same logits, where each prompt is computed in the chunks of `_batched`."""
        long, short = (LONG[:4], LONG[4:-1], LONG[-1:]), (SHORT[:-1], SHORT[-1:], CONTINUED[-1:])
        found = []
        for chunks in (long, short):
            rows = self._new_rows()
            row = rows.new()
            found.append([self._run_part(rows, [(row, chunk)]) for chunk in chunks])
        return mx.concatenate([found[0][-1], *found[1][-2:]])

    @cached_property
    def _rounding(self) -> float:
        """How far logits move when a prompt is computed in chunks, or its embeddings are nudged by the least."""
        return max(self._chunked_gap(LONG, self._separate[1][:1], mixed=False), self._nudged_gap())

    def _nudged_gap(self) -> float:
        nudged = self._variants.nudged()
        if nudged is None:
            return 0.0
        rows = self._new_rows()
        with nudged:
            return logits_gap(self._run_part(rows, [(rows.new(), LONG)]), self._separate[1][:1])

    @cached_property
    def _arithmetic(self) -> float:
        """The same with our attention, which adds and rounds in another order, for prompts alone in their batch."""
        prompts = enumerate((LONG, SHORT, CONTINUED))
        try:
            gap = max(self._chunked_gap(prompt, self._separate[1][at : at + 1], mixed=True) for at, prompt in prompts)
        except Exception:  # of a model that takes no mixed batches, in whatever way
            return 0.0
        return gap if gap < WRONG_GAP[self._dtype] / 2 else 0.0

    def _chunked_gap(self, prompt: list[int], expected: mx.array, *, mixed: bool) -> float:
        rows = self._new_rows()
        row = rows.new()
        for piece in (prompt[:2], prompt[2:-1], prompt[-1:]):
            if piece:
                logits = self._run(rows, [[(row, piece)]], mixed=mixed)
        return logits_gap(logits, expected)

    def _is_right(self, ragged: bool, mixed: bool) -> bool:
        try:
            found = self._batched(ragged=ragged, mixed=mixed)
            gap = logits_gap(found, self._separate[1])
            if self._in_chunks and not is_close_gap(gap, 0, self._dtype):
                gap = logits_gap(found, self._separate_in_chunks)
        # Whatever it is that a model cannot do with rows unlike each other, the conclusion is the same.
        except Exception as error:
            reason = " ".join(str(error).split())[:100]
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            self._unmixed = self._unmixed or f"{kind}{reason}"
            return False
        if is_close_gap(gap, 0, self._dtype):
            return True
        self._unmixed = self._unmixed or f"logits differ by {gap:.2g} of their range"
        if gap >= WRONG_GAP[self._dtype]:
            return False
        noise = self._nudged_gap() if self._in_chunks else max(self._rounding, self._arithmetic)
        return is_close_gap(gap, noise, self._dtype)

    def _batched(self, *, ragged: bool, mixed: bool) -> mx.array:
        """Two prompts at once, then the short one decoding with the long one's prefill, then both decoding: as one part
        where they are `ragged`, and all that runs at once in one forward pass where parts are `mixed`."""
        rows = self._new_rows()
        short, long = rows.new(), rows.new()

        def run(*parts: list[RowTokens]) -> mx.array:
            if mixed:
                return self._run(rows, parts, mixed=True)
            return mx.concatenate([self._run_part(rows, part) for part in parts])

        run([(short, SHORT[:-1])], [(long, LONG[:4])])
        first = run([(short, SHORT[-1:])], [(long, LONG[4:-1])])[0]
        last = [(short, CONTINUED[-1:]), (long, LONG[-1:])]
        both = run(last) if ragged else run(*([each] for each in last))
        return mx.stack([both[1], first, both[0]])

    def _run_part(self, rows: BatchState, part: list[RowTokens]) -> mx.array:
        return self._run(rows, [part], mixed=False)

    def _run(self, rows: BatchState, parts: Sequence[list[RowTokens]], *, mixed: bool) -> mx.array:
        """Logits [rows, vocab] after each row's last token."""
        tokens = [token for part in parts for _, fed in part for token in fed]
        ends = list(accumulate(len(fed) for part in parts for _, fed in part))
        forward_parts = [ForwardPart(tuple(row for row, _ in part), len(part[0][1])) for part in parts]
        with self._run_context() or nullcontext():
            logits = self._forward(rows, mx.array(tokens), forward_parts, [end - 1 for end in ends], mixed=mixed)
            mx.eval(logits, rows.pending())
        if logits.shape[0] != len(ends):
            raise ModelError(f"The model answers with logits of shape {logits.shape}; ingot expects one row a token")
        return logits


def logits_gap(found: mx.array, expected: mx.array) -> float:
    """The largest difference of two sets of logits [.., vocab], as a share of the expected ones' range.

    Tokens that a model rules out (with a logit of minus infinity) must be the same; what is not a number is infinitely
    far from anything.
    """
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    finite = mx.isfinite(expected)
    lowest = mx.min(mx.where(finite, expected, mx.inf), axis=-1)
    highest = mx.max(mx.where(finite, expected, -mx.inf), axis=-1)
    gaps = mx.where(found == expected, 0, mx.abs(found - expected))
    shares = mx.max(gaps, axis=-1) / (highest - lowest)
    worst = mx.max(mx.where(mx.isfinite(shares), shares, mx.inf)).item()
    assert isinstance(worst, float)
    return worst
