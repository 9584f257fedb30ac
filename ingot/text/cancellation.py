"""Work that nobody waits for any more stops at the next place where it can.

Whoever starts a piece of work sets `current` to a question: whether it is still wanted. What may take long asks it now
and then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from ingot.errors import Cancelled

current: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)


def wanted() -> bool:
    """Whether somebody still waits for the work that this thread does."""
    return current.get()()


def checkpoint() -> None:
    """Goes on where the work is still wanted. Raises Cancelled where it is not."""
    if not wanted():
        raise Cancelled("Nobody waits for this any more.")
