"""Work that nobody waits for any more stops at its next checkpoint.

Whoever starts work sets `still_wanted` to a function that returns whether it is still wanted. Long-running code calls
`checkpoint` now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from ingot.errors import Cancelled

still_wanted: ContextVar[Callable[[], bool]] = ContextVar("wanted", default=lambda: True)


def is_wanted() -> bool:
    """Whether somebody still waits for the work that this thread does."""
    return still_wanted.get()()


def checkpoint() -> None:
    """Goes on where the work is still wanted. Raises Cancelled where it is not."""
    if not is_wanted():
        raise Cancelled("Nobody waits for this any more.")
