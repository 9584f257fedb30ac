"""What running sequences hold and may still take: each page once, however many of them hold it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from ingot.cache.footprint import PageCount
from ingot.engine.memory_budget import Budget
from ingot.engine.sequence import Sequence

HeldPages = tuple[Many[int], Many[int]]
"""Raw ones, and those in fewer bits."""
Known = Callable[[Sequence], Many[HeldPages]]
"""By group, the pages that a sequence which does not run yet would take over."""


class Room:
    def __init__(self, budget: Budget, known: Known) -> None:
        self._budget, self._known = budget, known

    def fits(self, reserved: Many[tuple[Sequence, int]]) -> bool:
        """Whether sequences with these reservations, in tokens, can run together."""
        if self._budget.fits([(tokens, sequence.request.exact) for sequence, tokens in reserved]):
            return True  # even if they share nothing
        return self.needed(reserved) <= self._budget.states

    def needed(self, reserved: Many[tuple[Sequence, int]]) -> int:
        """Bytes that their states take once they are as long as what is reserved for them."""
        held = [(self._held(sequence), tokens, sequence.request.exact) for sequence, tokens in reserved]
        total = self._budget.slot_bytes(len(reserved))
        for group in range(len(self._budget.footprint.groups)):
            counts = [0, 0]
            for form in (0, 1):
                pages: set[int] = set()
                for tables, tokens, exact in held:
                    own = tables[group][form] if tables else ()
                    pages.update(own)
                    counts[form] += max(0, self._budget.pages(group, tokens, exact=exact)[form] - len(own))
                counts[form] += len(pages)
            total += self._budget.pages_bytes(group, PageCount(*counts))
        return total

    def _held(self, sequence: Sequence) -> Many[HeldPages]:
        if sequence.row is not None:
            tables = sequence.row.tables
            return [(table.numbers[table.coded :], table.numbers[: table.coded]) for table in tables]
        return self._known(sequence)
