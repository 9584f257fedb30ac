"""Which of a step's work shares a forward pass.

Where the model's mixers take mixed launches apart, everything does: decoding rows and prompt chunks of any width,
without padding. Elsewhere decoding rows run together, and prompt chunks of neighbouring slots and like widths.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from ingot.engine.budget import Budget
from ingot.engine.scheduler import Chunk
from ingot.engine.sequence import Sequence
from ingot.models.adapter import Adapter

PADDING_SHARE = 0.25
"""Prompts are padded to run together when at most this share of the launch is padding."""


@dataclass(frozen=True, slots=True)
class LaunchPart:
    """Rows of neighbouring slots: the next `counts[i]` tokens of each, after which it draws one where `draws[i]`."""

    rows: tuple[Sequence, ...]
    counts: tuple[int, ...]
    draws: tuple[bool, ...]
    scoring: bool = False  # a prompt alone, whose logprobs are asked for

    @property
    def first(self) -> int:
        """The first row's slot, which may change from one forward pass to the next."""
        slot = self.rows[0].slot
        assert slot is not None
        return slot

    @property
    def width(self) -> int:
        return max(self.counts)

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def context(self) -> int:
        """The length of its longest row when it is done."""
        return max(row.computed + count for row, count in zip(self.rows, self.counts, strict=True))

    def work(self) -> Iterable[tuple[Sequence, int, bool]]:
        return zip(self.rows, self.counts, self.draws, strict=True)

    @property
    def decoding(self) -> bool:
        return self.rows[0].decoding


class Passes:
    def __init__(self, adapter: Adapter, budget: Budget) -> None:
        self._adapter, self._budget = adapter, budget

    def of(self, decoding: Many[Sequence], chunks: Many[Chunk], capacity: int) -> list[list[LaunchPart]]:
        """The parts of each forward pass. `decoding` lie in slots 0, 1..; slots have room for `capacity` tokens.

        They must run in this order, as drawing a prompt's first token moves its row.
        """
        decode = [_decoding(rows) for rows in self._alike(decoding)]
        if not self._adapter.mixed:
            return [[part] for part in (*decode, *self._padded(chunks, capacity))]
        prompts = [_chunk(chunk) for chunk in chunks]
        scored = [[part] for part in prompts if part.scoring]
        return [*self._packed([*decode, *(part for part in prompts if not part.scoring)]), *scored]

    def _alike(self, rows: Many[Sequence]) -> list[list[Sequence]]:
        """Decoding rows that run as one: all of them, or those of equal length that lie together."""
        if self._adapter.ragged:
            return [list(rows)] if rows else []
        groups: list[list[Sequence]] = []
        for row in rows:
            if groups and groups[-1][0].computed == row.computed:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

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

    def _padded(self, chunks: Iterable[Chunk], capacity: int) -> list[LaunchPart]:
        """Chunks of neighbouring slots and like widths together."""
        groups: list[list[Chunk]] = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.sequence.slot or 0):
            if groups and self._joins(groups[-1], chunk, capacity):
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        return [_chunk(*group) for group in groups]

    def _joins(self, group: list[Chunk], chunk: Chunk, capacity: int) -> bool:
        members = [*group, chunk]
        if any(member.sequence.scoring for member in members) or not self._adapter.padded:
            return False
        assert chunk.sequence.slot is not None and group[-1].sequence.slot is not None
        width = max(member.count for member in members)
        longest = max(member.sequence.computed for member in members)
        padding = 1 - sum(member.count for member in members) / (width * len(members))
        return (
            chunk.sequence.slot == group[-1].sequence.slot + 1
            and padding <= PADDING_SHARE
            and longest + width <= capacity
            and self._budget.runs([(width * len(members), longest + width)])
        )


def _decoding(rows: Many[Sequence]) -> LaunchPart:
    return LaunchPart(tuple(rows), (1,) * len(rows), (True,) * len(rows))


def _chunk(*chunks: Chunk) -> LaunchPart:
    return LaunchPart(
        tuple(chunk.sequence for chunk in chunks),
        tuple(chunk.count for chunk in chunks),
        tuple(chunk.final for chunk in chunks),
        scoring=chunks[0].sequence.scoring,
    )
