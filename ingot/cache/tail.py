"""How much of a sequence is read in fewer bits, where live keys and values are coded: all but a tail of the newest.

Pure arithmetic on lengths, so that what a token sees follows from its place alone: not from who runs beside it, how a
prompt is cut or whether tokens were guessed. Pages are encoded some at a time, since a launch must not reach over a
place at which more of them are.
"""

from __future__ import annotations

from typing import Final

from ingot.cache.pages import PAGE, pages_of

TAIL: Final = 256
"""Tokens before a launch's first one that are seen as they were computed, at least."""
STEP: Final = 1024
"""Tokens that are encoded at once, as soon as they all lie behind the tail."""


def coded_pages(length: int) -> int:
    """Pages, from the first on, that a launch which begins behind `length` tokens reads in fewer bits."""
    return max(0, length - TAIL) // STEP * (STEP // PAGE)


def launch_end(length: int) -> int:
    """Where a launch that begins behind `length` tokens ends at the latest: what comes then sees more of them coded."""
    return coded_pages(length) * PAGE + STEP + TAIL


def raw_pages(tokens: int) -> int:
    """Raw pages that a sequence may hold on its way to so many tokens: one more than are due, for tokens that are taken
    back."""
    return pages_of(min(tokens, TAIL + STEP + PAGE))
