"""Which of a step's work shares a forward pass: all of it, as far as memory allows.

Only a prompt whose logprobs are asked for takes a pass of its own, and every part does where the model's code cannot
mix them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import mlx.core as mx

from ingot.cache.forward_batch import Part, Row
from ingot.engine.memory_budget import Budget, PassPart
from ingot.engine.scheduler import Chunk
from ingot.engine.sequence import Sequence
from ingot.media.items import Span
from ingot.models.adapter import Adapter

Guess = tuple[int, ...]
"""Tokens that a sequence may draw next."""
NO_GUESSES: Mapping[Sequence, Guess] = {}


@dataclass(frozen=True, slots=True)
class LaunchPart:
    """The next `width` tokens of each sequence, the last of them `guessed`. If it `draws`, it does so after each of the
    guessed ones and after the one before them."""

    sequences: tuple[Sequence, ...]
    width: int
    draws: bool
    scoring: bool = False  # a prompt alone, whose logprobs are asked for
    guessed: int = 0

    @property
    def part(self) -> Part:
        rows = tuple(_row(sequence) for sequence in self.sequences)
        stated, following = self._positions()
        return Part(rows, self.width, stated, following, self.guessed, self._mutual)

    @property
    def _mutual(self) -> tuple[Span, ...]:
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


def _row(sequence: Sequence) -> Row:
    assert sequence.row is not None
    return sequence.row


def _has_adapter(sequence: Sequence) -> bool:
    return sequence.request.lora is not None


def _alike(rows: Many[Sequence], guesses: Mapping[Sequence, Guess]) -> list[tuple[list[Sequence], int, int]]:
    """Rows with as many tokens to compute, and as many of them guessed; the fewest first."""
    found: dict[tuple[int, int], list[Sequence]] = {}
    for row in rows:
        found.setdefault((row.remaining, len(guesses.get(row, ()))), []).append(row)
    return [(alike, *key) for key, alike in sorted(found.items(), key=lambda item: item[0])]


class Passes:
    def __init__(self, adapter: Adapter, budget: Budget) -> None:
        self._adapter, self._budget = adapter, budget

    def of(
        self, decoding: Many[Sequence], chunks: Many[Chunk], guesses: Mapping[Sequence, Guess] = NO_GUESSES
    ) -> list[list[LaunchPart]]:
        """The parts of each forward pass, decoding ones first."""
        rows = (*decoding, *(chunk.sequence for chunk in chunks))
        if not any(map(_has_adapter, rows)) or not self._adapter.adapts_apart:
            return self._of_any(decoding, chunks, guesses)
        return [
            parts
            for adapted in (False, True)
            for parts in self._of_any(
                [row for row in decoding if _has_adapter(row) == adapted],
                [chunk for chunk in chunks if _has_adapter(chunk.sequence) == adapted],
                guesses,
            )
        ]

    def _of_any(
        self, decoding: Many[Sequence], chunks: Many[Chunk], guesses: Mapping[Sequence, Guess]
    ) -> list[list[LaunchPart]]:
        decode = [part for alike in _alike(decoding, guesses) for part in self._together(*alike)]
        prompts = [LaunchPart((chunk.sequence,), chunk.count, chunk.final, chunk.sequence.scoring) for chunk in chunks]
        if not self._adapter.mixed:
            return [[part] for part in (*decode, *prompts)]
        scored = [[part] for part in prompts if part.scoring]
        return [*self._packed([*decode, *(part for part in prompts if not part.scoring)]), *scored]

    def _together(self, rows: Many[Sequence], remaining: int, guessed: int) -> list[LaunchPart]:
        """Decoding rows that are one part: all of them, where the model's code takes rows of different lengths and
        memory allows."""
        whole = LaunchPart(tuple(rows), remaining + guessed, draws=True, guessed=guessed)
        if len(rows) == 1 or (self._adapter.ragged and self._budget.runs([whole.size])):
            return [whole]
        middle = len(rows) // 2
        halves = rows[:middle], rows[middle:]
        return [part for half in halves for part in self._together(half, remaining, guessed)]

    def _packed(self, parts: Iterable[LaunchPart]) -> list[list[LaunchPart]]:
        """As few forward passes as memory allows."""
        passes: list[list[LaunchPart]] = []
        for part in parts:
            together = [*passes[-1], part] if passes else []
            if together and self._budget.runs([each.size for each in together]):
                passes[-1] = together
            else:
                passes.append([part])
        return passes
