"""What live layer states cost, as numbers: known to the memory model without touching mlx."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ingot.cache.pages import PAGE, pages_of

CAPACITY_STEP = 4 * PAGE
"""Reservations are whole steps of this many tokens."""

EARLIER_BYTES = 256 << 20
"""What recurrent states before each of the tokens that may be taken back may take in all, and what of memory is set
aside for it at most; where that does not do, only those before all of the tokens are kept."""


class Gathered(NamedTuple):
    """Bytes of a token in one layer, where pages are laid one behind another before they are attended to; 0 where they
    are read as they lie."""

    few: int = 0  # for launches of up to `width` tokens a row,
    many: int = 0  # and of more
    width: int = 0
    unpacked: int = 0  # of more, where kernels unpack pages into memory that all layers share


NOTHING_GATHERED = Gathered()


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes. A row is a sequence's states; a token is one position of it."""

    groups: tuple[tuple[int | None, int], ...]
    """(window, or None where every token is kept; per token of a row) of each group of layers that forget alike."""
    recurrent: int  # per row
    activation: int  # per token of a launch
    score: int  # per token of a launch and token before it, where attention is not fused
    logits: int  # per sampled row
    scratch: int = 0  # held beside the weights, whatever runs
    tile: int | None = None  # tokens of a launch whose scores exist at once; None: all of them
    coded: int = 0  # per token of a row that lies behind its tail, where every one is kept in fewer bits; 0: none is
    gathered: Gathered = NOTHING_GATHERED  # per token before the end of a launch

    @property
    def token(self) -> int:
        """What a token of a row takes in the layers that keep every one."""
        return sum(size for window, size in self.groups if window is None)


def rounded(tokens: int) -> int:
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP


class PageCount(NamedTuple):
    raw: int
    coded: int


def held_pages(tokens: int, window: int | None, widest: int) -> int:
    """Raw pages that a row of so many tokens may hold in a group, while a launch of up to `widest` tokens is
    computed."""
    if window is None:
        return pages_of(tokens)
    return min(pages_of(tokens), pages_of(window - 1 + widest) + 1)
