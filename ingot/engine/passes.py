"""Which of a step's work shares a forward pass: all of it, as far as memory allows.

Only a prompt whose logprobs are asked for takes a pass of its own, and every part does where the model's code cannot
mix them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from ingot.cache.launch import Part, Row
from ingot.engine.budget import Budget
from ingot.engine.scheduler import Chunk
from ingot.engine.sequence import Sequence
from ingot.models.adapter import Adapter


@dataclass(frozen=True, slots=True)
class LaunchPart:
    """The next `width` tokens of each sequence, after which it draws one if it `draws`."""

    sequences: tuple[Sequence, ...]
    width: int
    draws: bool
    scoring: bool = False  # a prompt alone, whose logprobs are asked for

    @property
    def part(self) -> Part:
        return Part(tuple(_row(sequence) for sequence in self.sequences), self.width)

    @property
    def tokens(self) -> int:
        return self.width * len(self.sequences)

    @property
    def context(self) -> int:
        """The length of its longest sequence when it is done."""
        return max(sequence.computed for sequence in self.sequences) + self.width

    @property
    def decoding(self) -> bool:
        return self.sequences[0].decoding


def _row(sequence: Sequence) -> Row:
    assert sequence.row is not None
    return sequence.row


class Passes:
    def __init__(self, adapter: Adapter, budget: Budget) -> None:
        self._adapter, self._budget = adapter, budget

    def of(self, decoding: Many[Sequence], chunks: Many[Chunk]) -> list[list[LaunchPart]]:
        """The parts of each forward pass, decoding ones first."""
        decode = [LaunchPart(tuple(rows), 1, draws=True) for rows in self._together(decoding)]
        prompts = [LaunchPart((chunk.sequence,), chunk.count, chunk.final, chunk.sequence.scoring) for chunk in chunks]
        if not self._adapter.mixed:
            return [[part] for part in (*decode, *prompts)]
        scored = [[part] for part in prompts if part.scoring]
        return [*self._packed([*decode, *(part for part in prompts if not part.scoring)]), *scored]

    def _together(self, rows: Many[Sequence]) -> list[list[Sequence]]:
        """Decoding rows that are one part: all of them, where the model's code takes rows of different lengths."""
        if not rows:
            return []
        return [list(rows)] if self._adapter.ragged else [[row] for row in rows]

    def _packed(self, parts: Iterable[LaunchPart]) -> list[list[LaunchPart]]:
        """As few forward passes as memory allows."""
        passes: list[list[LaunchPart]] = []
        for part in parts:
            together = [*passes[-1], part] if passes else []
            if together and self._budget.runs([(each.tokens, each.context) for each in together]):
                passes[-1] = together
            else:
                passes.append([part])
        return passes
