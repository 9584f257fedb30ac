"""What KV state costs, as numbers that the memory budget knows without touching mlx; and how much of a sequence is read
in fewer bits, where live keys and values are quantised: all but a tail of the newest tokens.

The second is pure arithmetic on lengths, so that what a token sees follows from its place alone: not from who runs
beside it, how a prompt is chunked or whether tokens were drafted. Pages are encoded some at a time, and a forward batch
must not reach over a place at which more of them are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ingot.cache.pages import PAGE, pages_for_tokens

CAPACITY_STEP = 4 * PAGE
"""Reservations are whole steps of this many tokens."""

REWIND_STATE_BYTES = 256 << 20
"""What recurrent states before each of the tokens that may be taken back may take in all, and what of memory is set
aside for it at most; where that does not do, only those before all of the tokens are kept."""


class GatherCost(NamedTuple):
    """Bytes of a token in one layer, where pages are laid one behind another before they are attended to; 0 where they
    are read as they lie."""

    few: int = 0  # for launches of up to `width` tokens a row,
    many: int = 0  # and of more
    width: int = 0
    unpacked: int = 0  # of more, where kernels unpack pages into memory that all layers share


NO_GATHER_COST = GatherCost()


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
    gathered: GatherCost = NO_GATHER_COST  # per token before the end of a launch

    @property
    def token(self) -> int:
        """What a token of a row takes in the layers that keep every one."""
        return sum(size for window, size in self.groups if window is None)


def round_up_capacity(tokens: int) -> int:
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP


class PageCount(NamedTuple):
    raw: int
    coded: int


def pages_held_by_row(tokens: int, window: int | None, widest: int) -> int:
    """Raw pages that a row of so many tokens may hold in a group, while a launch of up to `widest` tokens is
    computed."""
    if window is None:
        return pages_for_tokens(tokens)
    return min(pages_for_tokens(tokens), pages_for_tokens(window - 1 + widest) + 1)


RAW_TAIL_TOKENS: Final = 256
"""Tokens before a launch's first one that are seen as they were computed, at least."""
ENCODE_STEP_TOKENS: Final = 1024
"""Tokens that are encoded at once, as soon as they all lie behind the tail."""


def coded_page_count(length: int) -> int:
    """Pages, from the first on, that a launch which begins behind `length` tokens reads in fewer bits."""
    return max(0, length - RAW_TAIL_TOKENS) // ENCODE_STEP_TOKENS * (ENCODE_STEP_TOKENS // PAGE)


def batch_end_limit(length: int) -> int:
    """Where a launch that begins behind `length` tokens ends at the latest: what comes then sees more of them coded."""
    return coded_page_count(length) * PAGE + ENCODE_STEP_TOKENS + RAW_TAIL_TOKENS


def raw_page_limit(tokens: int) -> int:
    """Raw pages that a sequence may hold on its way to so many tokens: one more than are due, for tokens that are taken
    back."""
    return pages_for_tokens(min(tokens, RAW_TAIL_TOKENS + ENCODE_STEP_TOKENS + PAGE))
