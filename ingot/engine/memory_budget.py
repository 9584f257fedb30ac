"""The memory model: what the states of running sequences take, from the model's own shapes, before they exist.

Pure arithmetic. A sequence takes the pages that its tokens lie in, in each group of layers that forget alike, and a
slot of the recurrent states. What several hold together is counted once, by who knows what they hold (`room.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ingot.cache.footprint import EARLIER_BYTES, Footprint, PageCount, held_pages, rounded
from ingot.cache.pages import PAGE
from ingot.cache.tail import coded_pages, raw_pages

TRANSIENT_SHARE = 0.25
"""At most this share of what the weights leave is set aside for what a forward pass holds while it runs."""

EARLIER_SHARE = 1 / 16
"""And this share at most for recurrent states that rows may go back to, where tokens were guessed wrongly."""
DEEPEST = 16
"""Tokens that a row may go back, as far as memory is set aside for it."""
COPIES, COPIES_OF_SEVERAL = 2, 4
"""How often gathered pages exist at a time: as they are read, and one behind another; of several rows one beside
another, too, and without what lies behind their ends."""


class PassPart(NamedTuple):
    """Tokens of some rows that are computed in a forward pass, of which the longest is `context` tokens long then."""

    tokens: int
    context: int
    rows: int = 1


class Budget:
    """Says whether a set of sequences fits, and how wide a launch may be."""

    def __init__(self, total: int, weights: int, footprint: Footprint, *, context: int, widest: int, rows: int) -> None:
        self.total, self.weights, self.footprint = total, weights, footprint
        self.widest, self._rows = widest, rows
        free = max(0, total - weights - footprint.scratch)
        # Rows whose pages are gathered are parted where they do not fit at once: one of them has to.
        wanted = self.pass_bytes([PassPart(widest, context), PassPart(rows, context)]) + rows * 4 * footprint.logits
        self.transient = min(wanted, int(free * TRANSIENT_SHARE))
        self.earlier = min(DEEPEST * rows * footprint.recurrent, EARLIER_BYTES, int(free * EARLIER_SHARE))
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
        copies = COPIES if part.rows == 1 else COPIES_OF_SEVERAL
        each = copies * few if part.tokens <= width * part.rows else copies * many + unpacked
        return each * part.rows * self._seen(part.context)

    def _seen(self, context: int) -> int:
        """Tokens of such a context that a layer sees at most."""
        windows = [window for window, _ in self.footprint.groups if window is not None]
        return context if len(windows) < len(self.footprint.groups) else min(context, max(windows) + self.widest)

    def runs(self, parts: Iterable[PassPart]) -> bool:
        """Whether parts fit in one forward pass."""
        return self.pass_bytes(parts) <= self.transient

    def pages_bytes(self, group: int, pages: PageCount) -> int:
        """What so many pages of a group take."""
        return PAGE * (pages.raw * self.footprint.groups[group][1] + pages.coded * self.footprint.coded)

    def pages(self, group: int, tokens: int, *, exact: bool = False) -> PageCount:
        """Pages of a group that a sequence with room for so many tokens may hold. One that is `exact` has none in fewer
        bits."""
        window = self.footprint.groups[group][0]
        if window is None and self.footprint.coded and not exact:
            return PageCount(raw_pages(tokens), coded_pages(tokens))
        return PageCount(held_pages(tokens, window, self.widest), 0)

    def slot_bytes(self, rows: int) -> int:
        """What the recurrent states of so many sequences take: slots are made in powers of two."""
        return self.footprint.recurrent * (1 << (rows - 1).bit_length()) if rows else 0

    def row_bytes(self, tokens: int, *, exact: bool = False) -> int:
        """What a sequence with room for so many tokens takes in pages, if it shares none of them."""
        groups = range(len(self.footprint.groups))
        return sum(self.pages_bytes(group, self.pages(group, tokens, exact=exact)) for group in groups)

    def fits(self, reserved: Sequence[tuple[int, bool]]) -> bool:
        """Whether sequences with these reservations, in tokens, and exact or not, can run together, though they share
        nothing."""
        taken = sum(self.row_bytes(rounded(tokens), exact=exact) for tokens, exact in reserved)
        return taken + self.slot_bytes(len(reserved)) <= self.states

    def longest(self, limit: int, *, exact: bool = False) -> int:
        """The longest single sequence that fits, at most `limit` tokens."""
        return _most(limit, lambda tokens: self.fits([(tokens, exact)]))

    def widest_launch(self, context: int) -> int:
        """Tokens that one launch may compute behind `context` earlier ones, with room for some that decode."""

        def fits(width: int) -> bool:
            return self.runs([PassPart(width + min(self._rows, width), context + width)])

        return max(1, _most(self.widest, fits))


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, where all that are smaller do; 0 where none does."""
    if fits(limit):
        return limit
    low, high = 0, limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
