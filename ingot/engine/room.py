"""What running sequences hold and may still take: each page once, however many of them hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

from ingot.engine.budget import Budget
from ingot.engine.sequence import Sequence

Known = Callable[[Sequence], Many[Iterable[int]]]
"""By group, the pages that a sequence which does not run yet would take over."""


class Room:
    def __init__(self, budget: Budget, known: Known) -> None:
        self._budget, self._known = budget, known

    def fits(self, reserved: Many[tuple[Sequence, int]]) -> bool:
        """Whether sequences with these reservations, in tokens, can run together."""
        if self._budget.fits([tokens for _, tokens in reserved]):
            return True  # even if they share nothing
        return self.needed(reserved) <= self._budget.states

    def needed(self, reserved: Many[tuple[Sequence, int]]) -> int:
        """Bytes that their states take once they are as long as what is reserved for them."""
        held = [(self._held(sequence), tokens) for sequence, tokens in reserved]
        total = self._budget.slot_bytes(len(reserved))
        for group in range(len(self._budget.footprint.groups)):
            pages: set[int] = set()
            ahead = 0
            for tables, tokens in held:
                own = tables[group] if tables else ()
                pages.update(own)
                ahead += max(0, self._budget.pages(group, tokens) - len(own))
            total += self._budget.page_bytes(group) * (len(pages) + ahead)
        return total

    def _held(self, sequence: Sequence) -> Many[Many[int]]:
        if sequence.row is not None:
            return [table.numbers for table in sequence.row.tables]
        return [list(pages) for pages in self._known(sequence)]
