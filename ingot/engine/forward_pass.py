"""Forward passes: how a step's work is split into them, and the results of each.

All of a step's work shares one pass, as far as memory allows. A prompt whose logprobs were requested takes a pass of
its own, and so does every part where the model's code cannot mix prefill and decode. Results are tokens and logprobs,
by sequence; `read_results` waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast, overload

import mlx.core as mx

from ingot.cache.forward_batch import ForwardPart
from ingot.engine.memory_budget import MemoryBudget, PassPart
from ingot.engine.sampling import DraftPosition, SampledTokens
from ingot.engine.scheduler import PromptChunk
from ingot.engine.sequence import TokenSequence
from ingot.models.adapter import ModelAdapter

DraftTokens = Sequence[int]
"""Proposed as a sequence's next tokens."""


class DraftedBatch:
    """Draft tokens of several rows [rows, depths] (int32), which the device may still be computing."""

    def __init__(self, array: mx.array) -> None:
        self.array = array

    @cached_property
    def values(self) -> list[list[int]]:
        """Waits for them."""
        return cast(list[list[int]], self.array.tolist())


class DeviceTokens(Sequence[int]):
    """The first tokens of a row of a drafted batch. How many there are is known at once; whoever looks at one of them
    waits for all. So a pass that verifies them is launched while they are still being computed."""

    def __init__(self, batch: DraftedBatch, row: int, count: int) -> None:
        self._batch, self._row, self._count = batch, row, count

    @property
    def array(self) -> mx.array:
        """[tokens]."""
        return self._batch.array[self._row, : self._count].view(mx.uint32)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> DraftTokens: ...
    def __getitem__(self, at: int | slice) -> int | DraftTokens:
        if isinstance(at, slice) and not at.start and at.step is None:
            return DeviceTokens(self._batch, self._row, len(range(self._count)[at]))
        return self._batch.values[self._row][: self._count][at]


NO_DRAFT_TOKENS: Mapping[TokenSequence, DraftTokens] = {}


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The next `width` tokens of each sequence, of which the last are draft tokens. If it `samples`, a token is sampled
    after each draft token and after the one before them."""

    sequences: tuple[TokenSequence, ...]
    width: int
    samples: bool
    scoring: bool = False  # a prompt whose logprobs were requested
    draft_tokens: int = 0

    @property
    def part(self) -> ForwardPart:
        rows, first = tuple(sequence.live_row for sequence in self.sequences), self.sequences[0]
        if self.decoding:
            return ForwardPart(rows, self.width, None, None, self.draft_tokens)
        begin, end = first.computed, first.computed + self.width
        positions = first.explicit_positions(begin, end)
        mutual = () if first.prompt_media is None else first.prompt_media.mutual_within(begin, end)
        if positions is None:
            return ForwardPart(rows, self.width, None, None, self.draft_tokens, mutual)
        return ForwardPart(rows, self.width, mx.array(positions), first.position(end), self.draft_tokens, mutual)

    @property
    def tokens(self) -> int:
        return self.width * len(self.sequences)

    @property
    def context(self) -> int:
        """The length of its longest sequence after the pass."""
        return max(sequence.computed for sequence in self.sequences) + self.width

    @property
    def size(self) -> PassPart:
        return PassPart(self.tokens, self.context, len(self.sequences))

    @property
    def decoding(self) -> bool:
        return self.sequences[0].decoding


def _has_adapter(sequence: TokenSequence) -> bool:
    return sequence.request.lora is not None


def _group_alike(
    rows: Sequence[TokenSequence], drafts: Mapping[TokenSequence, DraftTokens]
) -> list[tuple[list[TokenSequence], int, int]]:
    """Rows with as many tokens to compute, and as many of them draft tokens; the fewest first."""
    groups: dict[tuple[int, int], list[TokenSequence]] = {}
    for row in rows:
        groups.setdefault((row.remaining, len(drafts.get(row, ()))), []).append(row)
    return [(alike, *key) for key, alike in sorted(groups.items(), key=lambda item: item[0])]


class PassPlanner:
    def __init__(self, adapter: ModelAdapter, budget: MemoryBudget) -> None:
        self._adapter, self._budget = adapter, budget

    def of(
        self,
        decoding: Sequence[TokenSequence],
        chunks: Sequence[PromptChunk],
        drafts: Mapping[TokenSequence, DraftTokens] = NO_DRAFT_TOKENS,
    ) -> list[list[BatchPart]]:
        """The parts of each forward pass, decoding ones first."""
        rows = (*decoding, *(chunk.sequence for chunk in chunks))
        if not any(map(_has_adapter, rows)) or not self._adapter.separates_lora_rows:
            return self._plan(decoding, chunks, drafts)
        return [
            parts
            for adapted in (False, True)
            for parts in self._plan(
                [row for row in decoding if _has_adapter(row) == adapted],
                [chunk for chunk in chunks if _has_adapter(chunk.sequence) == adapted],
                drafts,
            )
        ]

    def _plan(
        self,
        decoding: Sequence[TokenSequence],
        chunks: Sequence[PromptChunk],
        drafts: Mapping[TokenSequence, DraftTokens],
    ) -> list[list[BatchPart]]:
        decode = [part for alike in _group_alike(decoding, drafts) for part in self._together(*alike)]
        prompts = [BatchPart((chunk.sequence,), chunk.count, chunk.final, chunk.sequence.scoring) for chunk in chunks]
        if not self._adapter.mixed:
            return [[part] for part in (*decode, *prompts)]
        scored = [[part] for part in prompts if part.scoring]
        return [*self._packed([*decode, *(part for part in prompts if not part.scoring)]), *scored]

    def _together(self, rows: Sequence[TokenSequence], remaining: int, draft_tokens: int) -> list[BatchPart]:
        """Parts of decoding rows: a single one, where the model's code takes rows of different lengths and memory
        allows."""
        whole = BatchPart(tuple(rows), remaining + draft_tokens, samples=True, draft_tokens=draft_tokens)
        if len(rows) == 1 or (self._adapter.ragged and self._budget.runs([whole.size])):
            return [whole]
        middle = len(rows) // 2
        halves = rows[:middle], rows[middle:]
        return [part for half in halves for part in self._together(half, remaining, draft_tokens)]

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
    """(token, logprob) of one token and of the likeliest ones in its position."""

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
    """A running forward pass. At each of `positions` a token is sampled; `scored` is a prompt and its logprobs."""

    positions: tuple[DraftPosition, ...]
    sampled: SampledTokens | None
    marker: mx.array | None  # where nothing is sampled: something small that exists when the pass is done
    tokens: int
    prefill: bool
    began: float  # by time.perf_counter(), when its graph was begun
    scored: tuple[TokenSequence, SampledTokens] | None = None

    @property
    def rows(self) -> list[TokenSequence]:
        """Those for which tokens are sampled."""
        return [position.sequence for position in self.positions if not position.draft]

    @property
    def drafts(self) -> dict[TokenSequence, DraftTokens]:
        """The draft tokens that are verified."""
        return {position.sequence: position.draft for position in self.positions if position.draft}

    def arrays(self) -> list[mx.array]:
        sampled = self.sampled.arrays() if self.sampled else []
        scored = self.scored[1].arrays() if self.scored else []
        return [*sampled, *scored, *([] if self.marker is None else [self.marker])]


def read_results(launched: LaunchedPass) -> dict[TokenSequence, list[SequenceResult]]:
    """The sampled tokens of each sequence, position by position. Waits for them."""
    tokens = _to_list(launched.sampled.tokens) if launched.sampled is not None else []
    by_token: list[Logprobs | None] = [None] * len(tokens)
    if launched.sampled is not None and launched.sampled.logprobs is not None:
        by_token = [*_read_logprobs(launched.sampled, tokens)]
    sampled: dict[TokenSequence, list[SequenceResult]] = {}
    for position, token, logprobs in zip(launched.positions, tokens, by_token, strict=True):
        sampled.setdefault(position.sequence, []).append(SequenceResult(position.sequence, token, logprobs))
    if launched.scored is not None:
        row, scores = launched.scored
        [last] = sampled.get(row, [SequenceResult(row, None)])
        sampled[row] = [replace(last, prompt=tuple(_read_logprobs(scores, _to_list(scores.tokens))))]
    return sampled


def _to_list(array: mx.array) -> list[Any]:
    values: Any = array.tolist()
    return list(values)


def _read_logprobs(sampled: SampledTokens, tokens: list[int]) -> list[Logprobs]:
    assert sampled.logprobs is not None
    values = _to_list(sampled.logprobs)
    if sampled.top_tokens is None or sampled.top_logprobs is None:
        return [Logprobs((token, value), ()) for token, value in zip(tokens, values, strict=True)]
    likeliest = zip(_to_list(sampled.top_tokens), _to_list(sampled.top_logprobs), strict=True)
    return [
        Logprobs((token, value), tuple(zip(ids, logs, strict=True)))
        for token, value, (ids, logs) in zip(tokens, values, likeliest, strict=True)
    ]
