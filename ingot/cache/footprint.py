"""What KV state costs, as numbers for the memory budget, without mlx; and which pages of a sequence are read coded,
where live keys and values are quantised: all but a tail of the newest tokens.

The latter is arithmetic on lengths, so that what a token sees depends on its index alone: not on the rest of the batch,
on how a prompt is chunked, or on draft tokens. Pages are encoded several at a time, and a forward batch must not cross
an index at which more become coded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ingot.cache.pages import PAGE, pages_for_tokens

CAPACITY_STEP = 4 * PAGE
"""Reservations are whole steps of this many tokens."""

REWIND_STATE_BYTES = 256 << 20
"""The most memory for copies of recurrent states before each token that may be taken back. Where that is not enough,
only the states before all of these tokens are copied."""


class GatherCost(NamedTuple):
    """Bytes of a token in one layer, where pages are gathered before attention; 0 where they are read in place."""

    few: int = 0  # for batches of up to `width` tokens a row,
    many: int = 0  # and of more
    width: int = 0
    unpacked: int = 0  # of more, where kernels decode pages into memory that all layers share


NO_GATHER_COST = GatherCost()


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, of a row (a running sequence) or one of its tokens."""

    groups: tuple[tuple[int | None, int], ...]
    """(window, or None for append layers; bytes of a token) of each group of layers."""
    recurrent: int  # per row
    activation: int  # per token of a forward batch
    score: int  # per token of a forward batch and token before it, where attention is not fused
    logits: int  # per sampled row
    scratch: int = 0  # always allocated, in addition to the weights
    tile: int | None = None  # tokens of a forward batch whose scores exist at once; None: all of them
    coded: int = 0  # per coded token of a row in append layers; 0: none are coded
    gathered: GatherCost = NO_GATHER_COST  # per token before the end of a forward batch

    @property
    def token(self) -> int:
        """Bytes of a token in append layers."""
        return sum(size for window, size in self.groups if window is None)


def round_up_capacity(tokens: int) -> int:
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP


class PageCount(NamedTuple):
    raw: int
    coded: int


def row_page_limit(tokens: int, window: int | None, widest: int) -> int:
    """The most raw pages that a row of so many tokens holds in a group during a forward batch of up to `widest`
    tokens."""
    if window is None:
        return pages_for_tokens(tokens)
    return min(pages_for_tokens(tokens), pages_for_tokens(window - 1 + widest) + 1)


RAW_TAIL_TOKENS: Final = 256
"""The fewest tokens before a forward batch that it reads raw."""
ENCODE_STEP_TOKENS: Final = 1024
"""Tokens that are encoded at once, as soon as all of them are behind the tail."""


def coded_page_count(length: int) -> int:
    """How many of the first pages a forward batch that begins behind `length` tokens reads coded."""
    return max(0, length - RAW_TAIL_TOKENS) // ENCODE_STEP_TOKENS * (ENCODE_STEP_TOKENS // PAGE)


def batch_end_limit(length: int) -> int:
    """The last end of a forward batch that begins behind `length` tokens: later tokens read more pages coded."""
    return coded_page_count(length) * PAGE + ENCODE_STEP_TOKENS + RAW_TAIL_TOKENS


def raw_page_limit(tokens: int) -> int:
    """The most raw pages that a sequence holds as it grows to so many tokens: one more than it needs, for tokens that
    are taken back."""
    return pages_for_tokens(min(tokens, RAW_TAIL_TOKENS + ENCODE_STEP_TOKENS + PAGE))
