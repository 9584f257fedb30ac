"""Forward passes: which of a step's work shares one, and what each gives.

All of a step's work shares a pass, as far as memory allows. Only a prompt whose logprobs are asked for takes a
pass of its own, and every part does where the model's code cannot mix them. Results are tokens and logprobs, by
sequences; `read_results` waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ingot.cache.forward_batch import ForwardPart, Row
from ingot.engine.memory_budget import MemoryBudget, PassPart
from ingot.engine.sampling import DraftPosition, SampledTokens
from ingot.engine.scheduler import PromptChunk
from ingot.engine.sequence import TokenSequence
from ingot.media.items import TokenSpan
from ingot.models.adapter import ModelAdapter

DraftTokens = tuple[int, ...]
"""Tokens that a sequence may draw next."""
NO_DRAFT_TOKENS: Mapping[TokenSequence, DraftTokens] = {}


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The next `width` tokens of each sequence, the last of them `guessed`. If it `draws`, it does so after each of the
    guessed ones and after the one before them."""

    sequences: tuple[TokenSequence, ...]
    width: int
    draws: bool
    scoring: bool = False  # a prompt alone, whose logprobs are asked for
    guessed: int = 0

    @property
    def part(self) -> ForwardPart:
        rows = tuple(_row_of(sequence) for sequence in self.sequences)
        stated, following = self._positions()
        return ForwardPart(rows, self.width, stated, following, self.guessed, self._mutual)

    @property
    def _mutual(self) -> tuple[TokenSpan, ...]:
        first = self.sequences[0]
        if first.sight is None or self.decoding:
            return ()
        return first.sight.mutual_within(first.computed, first.computed + self.width)

    def _positions(self) -> tuple[mx.array | None, int | None]:
        """Where its tokens stand, and where the next does, where they do not follow each other as text does."""
        first = self.sequences[0]
        if self.decoding:
            return None, None
        end = first.computed + self.width
        stated = first.stated(first.computed, end)
        return (None, None) if stated is None else (mx.array(stated), first.position(end))

    @property
    def tokens(self) -> int:
        return self.width * len(self.sequences)

    @property
    def context(self) -> int:
        """The length of its longest sequence when it is done."""
        return max(sequence.computed for sequence in self.sequences) + self.width

    @property
    def size(self) -> PassPart:
        return PassPart(self.tokens, self.context, len(self.sequences))

    @property
    def decoding(self) -> bool:
        return self.sequences[0].decoding


def _row_of(sequence: TokenSequence) -> Row:
    assert sequence.row is not None
    return sequence.row


def _has_adapter(sequence: TokenSequence) -> bool:
    return sequence.request.lora is not None


def _group_alike(
    rows: Many[TokenSequence], drafts: Mapping[TokenSequence, DraftTokens]
) -> list[tuple[list[TokenSequence], int, int]]:
    """Rows with as many tokens to compute, and as many of them guessed; the fewest first."""
    found: dict[tuple[int, int], list[TokenSequence]] = {}
    for row in rows:
        found.setdefault((row.remaining, len(drafts.get(row, ()))), []).append(row)
    return [(alike, *key) for key, alike in sorted(found.items(), key=lambda item: item[0])]


class PassPlanner:
    def __init__(self, adapter: ModelAdapter, budget: MemoryBudget) -> None:
        self._adapter, self._budget = adapter, budget

    def of(
        self,
        decoding: Many[TokenSequence],
        chunks: Many[PromptChunk],
        drafts: Mapping[TokenSequence, DraftTokens] = NO_DRAFT_TOKENS,
    ) -> list[list[BatchPart]]:
        """The parts of each forward pass, decoding ones first."""
        rows = (*decoding, *(chunk.sequence for chunk in chunks))
        if not any(map(_has_adapter, rows)) or not self._adapter.separates_lora_rows:
            return self._of_any(decoding, chunks, drafts)
        return [
            parts
            for adapted in (False, True)
            for parts in self._of_any(
                [row for row in decoding if _has_adapter(row) == adapted],
                [chunk for chunk in chunks if _has_adapter(chunk.sequence) == adapted],
                drafts,
            )
        ]

    def _of_any(
        self, decoding: Many[TokenSequence], chunks: Many[PromptChunk], drafts: Mapping[TokenSequence, DraftTokens]
    ) -> list[list[BatchPart]]:
        decode = [part for alike in _group_alike(decoding, drafts) for part in self._together(*alike)]
        prompts = [BatchPart((chunk.sequence,), chunk.count, chunk.final, chunk.sequence.scoring) for chunk in chunks]
        if not self._adapter.mixed:
            return [[part] for part in (*decode, *prompts)]
        scored = [[part] for part in prompts if part.scoring]
        return [*self._packed([*decode, *(part for part in prompts if not part.scoring)]), *scored]

    def _together(self, rows: Many[TokenSequence], remaining: int, guessed: int) -> list[BatchPart]:
        """Decoding rows that are one part: all of them, where the model's code takes rows of different lengths and
        memory allows."""
        whole = BatchPart(tuple(rows), remaining + guessed, draws=True, guessed=guessed)
        if len(rows) == 1 or (self._adapter.ragged and self._budget.runs([whole.size])):
            return [whole]
        middle = len(rows) // 2
        halves = rows[:middle], rows[middle:]
        return [part for half in halves for part in self._together(half, remaining, guessed)]

    def _packed(self, parts: Iterable[BatchPart]) -> list[list[BatchPart]]:
        """As few forward passes as memory allows."""
        passes: list[list[BatchPart]] = []
        for part in parts:
            together = [*passes[-1], part] if passes else []
            if together and self._budget.runs([each.size for each in together]):
                passes[-1] = together
            else:
                passes.append([part])
        return passes


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one token: (token, logprob) of itself and of the likeliest ones."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a step gave one sequence: a new token, or logprobs of prompt tokens, or both."""

    sequence: TokenSequence
    token: int | None
    logprobs: Logprobs | None = None
    prompt: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A forward pass on its way. At each of `places` a token is drawn; `scored` is a prompt and its logprobs."""

    places: tuple[DraftPosition, ...]
    drawn: SampledTokens | None
    witness: mx.array | None  # where nothing is drawn: something small that exists when the pass is done
    tokens: int
    prefill: bool
    began: float  # when its graph was begun, on the clock of time.perf_counter()
    scored: tuple[TokenSequence, SampledTokens] | None = None

    @property
    def rows(self) -> list[TokenSequence]:
        """Those that draw."""
        return [place.sequence for place in self.places if not place.guessed]

    @property
    def drafts(self) -> dict[TokenSequence, DraftTokens]:
        """What is verified."""
        return {place.sequence: place.guessed for place in self.places if place.guessed}

    def arrays(self) -> list[mx.array]:
        drawn = self.drawn.arrays() if self.drawn else []
        scored = self.scored[1].arrays() if self.scored else []
        return [*drawn, *scored, *([] if self.witness is None else [self.witness])]


def read_results(launched: LaunchedPass) -> dict[TokenSequence, list[SequenceResult]]:
    """What was drawn for each sequence, place by place. Waits for it."""
    tokens = _to_list(launched.drawn.tokens) if launched.drawn is not None else []
    found: list[Logprobs | None] = [None] * len(tokens)
    if launched.drawn is not None and launched.drawn.logprobs is not None:
        found = [*_read_logprobs(launched.drawn, tokens)]
    drawn: dict[TokenSequence, list[SequenceResult]] = {}
    for place, token, logprobs in zip(launched.places, tokens, found, strict=True):
        drawn.setdefault(place.sequence, []).append(SequenceResult(place.sequence, token, logprobs))
    if launched.scored is not None:
        row, scores = launched.scored
        [last] = drawn.get(row, [SequenceResult(row, None)])
        drawn[row] = [replace(last, prompt=tuple(_read_logprobs(scores, _to_list(scores.tokens))))]
    return drawn


def _to_list(array: mx.array) -> list[Any]:
    values: Any = array.tolist()
    return list(values)


def _read_logprobs(drawn: SampledTokens, tokens: list[int]) -> list[Logprobs]:
    assert drawn.logprobs is not None
    values = _to_list(drawn.logprobs)
    if drawn.top_tokens is None or drawn.top_logprobs is None:
        return [Logprobs((token, value), ()) for token, value in zip(tokens, values, strict=True)]
    likeliest = zip(_to_list(drawn.top_tokens), _to_list(drawn.top_logprobs), strict=True)
    return [
        Logprobs((token, value), tuple(zip(ids, logs, strict=True)))
        for token, value, (ids, logs) in zip(tokens, values, likeliest, strict=True)
    ]
