"""The memory model: what the KV of running sequences takes, from the model's own shapes, before it exists.

`MemoryBudget` is pure arithmetic: a sequence takes the pages of its tokens, in each group of layers with the same
window, and a slot for recurrent state. `KVReservations` counts pages that several sequences share once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ingot.cache.footprint import (
    REWIND_STATE_BYTES,
    Footprint,
    PageCount,
    coded_page_count,
    raw_page_limit,
    round_up_capacity,
    row_page_limit,
)
from ingot.cache.pages import PAGE
from ingot.engine.sequence import TokenSequence

TRANSIENT_SHARE = 0.25
"""Of the memory that the weights leave, at most this share is reserved for what a forward pass holds while it runs."""

REWIND_SHARE = 1 / 16
"""And at most this share for recurrent states to rewind to, where draft tokens are rejected."""
DEEPEST_REWIND = 16
"""Tokens that a row can be rewound by, as far as that memory lasts."""
GATHERED_COPIES, GATHERED_COPIES_OF_SEVERAL = 2, 4
"""Copies of gathered pages that exist at a time: as read and concatenated, for several rows also padded and trimmed."""


class PassPart(NamedTuple):
    """Tokens of some rows in a forward pass; the longest row has `context` tokens after it."""

    tokens: int
    context: int
    rows: int = 1


class MemoryBudget:
    """Decides whether sequences fit together, and how wide a forward pass may be."""

    def __init__(self, total: int, weights: int, footprint: Footprint, *, context: int, widest: int, rows: int) -> None:
        self.total, self.weights, self.footprint = total, weights, footprint
        self.widest, self._rows = widest, rows
        free = max(0, total - weights - footprint.scratch)
        # Rows whose pages are gathered are split over passes where they do not fit at once: one of them has to fit.
        wanted = self.pass_bytes([PassPart(widest, context), PassPart(rows, context)]) + rows * 4 * footprint.logits
        self.transient = min(wanted, int(free * TRANSIENT_SHARE))
        self.earlier = min(DEEPEST_REWIND * rows * footprint.recurrent, REWIND_STATE_BYTES, int(free * REWIND_SHARE))
        self.states = free - self.transient - self.earlier

    def pass_bytes(self, parts: Iterable[PassPart]) -> int:
        """What a forward pass holds while it runs, besides logits."""
        return sum(map(self._part_bytes, parts))

    def _part_bytes(self, part: PassPart) -> int:
        shape = self.footprint
        at_once = part.tokens if shape.tile is None else min(part.tokens, shape.tile)
        return part.tokens * shape.activation + at_once * shape.score * part.context + self._gathered_bytes(part)

    def _gathered_bytes(self, part: PassPart) -> int:
        few, many, width, unpacked = self.footprint.gathered
        copies = GATHERED_COPIES if part.rows == 1 else GATHERED_COPIES_OF_SEVERAL
        each = copies * few if part.tokens <= width * part.rows else copies * many + unpacked
        return each * part.rows * self._seen(part.context)

    def _seen(self, context: int) -> int:
        """Tokens of such a context that a layer attends to at most."""
        windows = [window for window, _ in self.footprint.groups if window is not None]
        if len(windows) < len(self.footprint.groups) or not windows:
            return context
        return min(context, max(windows) + self.widest)

    def runs(self, parts: Iterable[PassPart]) -> bool:
        """Whether parts fit in one forward pass."""
        return self.pass_bytes(parts) <= self.transient

    def pages_bytes(self, group: int, pages: PageCount) -> int:
        """What so many pages of a group take."""
        return PAGE * (pages.raw * self.footprint.groups[group][1] + pages.coded * self.footprint.coded)

    def pages(self, group: int, tokens: int, *, exact: bool = False) -> PageCount:
        """Pages of a group that a sequence of so many tokens may hold; an `exact` one has no quantised pages."""
        window = self.footprint.groups[group][0]
        if window is None and self.footprint.coded and not exact:
            return PageCount(raw_page_limit(tokens), coded_page_count(tokens))
        return PageCount(row_page_limit(tokens, window, self.widest), 0)

    def slot_bytes(self, rows: int) -> int:
        """What the recurrent states of so many sequences take: slots come in powers of two."""
        return self.footprint.recurrent * (1 << (rows - 1).bit_length()) if rows else 0

    def row_bytes(self, tokens: int, *, exact: bool = False) -> int:
        """What the pages of a sequence of so many tokens take, if it shares none."""
        groups = range(len(self.footprint.groups))
        return sum(self.pages_bytes(group, self.pages(group, tokens, exact=exact)) for group in groups)

    def fits(self, reserved: Sequence[tuple[int, bool]]) -> bool:
        """Whether sequences with these reservations (tokens, exact or not) can run together without sharing pages."""
        needed = sum(self.row_bytes(round_up_capacity(tokens), exact=exact) for tokens, exact in reserved)
        return needed + self.slot_bytes(len(reserved)) <= self.states

    def longest(self, limit: int, *, exact: bool = False) -> int:
        """The longest single sequence that fits, at most `limit` tokens."""
        return _largest_fitting(limit, lambda tokens: self.fits([(tokens, exact)]))

    def widest_pass(self, context: int) -> int:
        """Prompt tokens that a forward pass may compute after `context` earlier ones, with room for decoding rows."""

        def fits(width: int) -> bool:
            return self.runs([PassPart(width + min(self._rows, width), context + width)])

        return max(1, _largest_fitting(self.widest, fits))


def _largest_fitting(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, where all smaller ones do; 0 where none does."""
    if fits(limit):
        return limit
    low, high = 0, limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


PagesByForm = tuple[Sequence[int], Sequence[int]]
"""Raw pages, and quantised ones."""
CachedPages = Callable[[TokenSequence], Sequence[PagesByForm]]
"""By group, the cached pages that a waiting sequence would reuse."""


class KVReservations:
    def __init__(self, budget: MemoryBudget, cached_pages: CachedPages) -> None:
        self._budget, self._cached_pages = budget, cached_pages

    def fits(self, reserved: Sequence[tuple[TokenSequence, int]]) -> bool:
        """Whether sequences with these reservations, in tokens, can run together."""
        if self._budget.fits([(tokens, sequence.request.exact) for sequence, tokens in reserved]):
            return True  # even if they share nothing
        return self.needed(reserved) <= self._budget.states

    def needed(self, reserved: Sequence[tuple[TokenSequence, int]]) -> int:
        """Bytes of their KV once they have grown to their reservations."""
        pages_in_use = [(self._pages_of(sequence), tokens, sequence.request.exact) for sequence, tokens in reserved]
        total = self._budget.slot_bytes(len(reserved))
        for group in range(len(self._budget.footprint.groups)):
            counts = [0, 0]
            for form in (0, 1):
                pages: set[int] = set()
                for tables, tokens, exact in pages_in_use:
                    own = tables[group][form] if tables else ()
                    pages.update(own)
                    counts[form] += max(0, self._budget.pages(group, tokens, exact=exact)[form] - len(own))
                counts[form] += len(pages)
            total += self._budget.pages_bytes(group, PageCount(*counts))
        return total

    def _pages_of(self, sequence: TokenSequence) -> Sequence[PagesByForm]:
        if sequence.row is not None:
            tables = sequence.row.tables
            return [(table.numbers[table.coded :], table.numbers[: table.coded]) for table in tables]
        return self._cached_pages(sequence)
