"""What rank 0 says to those that follow, in order, and what it hears when they are gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from ingot.errors import Unavailable
from ingot.ranks import plan
from ingot.ranks.plan import Kind
from ingot.ranks.wire import Link, LinkLate, LinkLost, broadcast

LOST = "The ranks of this model lost each other; they are started again"


class Voice:
    """Tells the followers, in order. Only the engine thread may call it."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._events: list[plan.Event] = []
        self._numbers = count()
        self.step = 0  # passes told
        self.trouble = ""  # why nothing can be told any more

    def number(self) -> int:
        """One that no checkpoint had before."""
        return next(self._numbers)

    def note(self, event: plan.Event) -> None:
        """Have it told with the next pass."""
        self._events.append(event)

    def tell(self, event: plan.Event) -> None:
        """Have it told now, and what was noted before it. Raises Unavailable where somebody is gone."""
        self._events.append(event)
        self._refuse_if_troubled()
        self.step += isinstance(event, plan.Pass)
        events, self._events = self._events, []
        try:
            broadcast(self._links, Kind.TOLD, plan.encode(events), self.step)
        except (LinkLost, LinkLate) as error:
            reason = self._reason() or error
            self.trouble = str(reason)
            raise reason from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What fails here after it was told leaves the others waiting for it: there is no going on."""
        self._refuse_if_troubled()
        try:
            yield
        except BaseException as error:
            self.trouble = self.trouble or f"{LOST}: {type(error).__name__}"
            raise

    def end(self) -> None:
        """Nobody is needed any more."""
        for link in self._links:
            with suppress(LinkLost, LinkLate):
                link.send(Kind.END)
            link.close()

    def _refuse_if_troubled(self) -> None:
        if self.trouble:
            raise Unavailable(LOST, retry_after=1)

    def _reason(self) -> Unavailable | None:
        """The last words of whoever is gone."""
        for link in self._links:
            try:
                frame = link.receive(0.0)
            except (LinkLost, LinkLate):
                continue
            if frame.kind == Kind.FAILED:
                return Unavailable(f"{LOST}: {frame.body.decode(errors='replace')}", retry_after=1)
        return None
