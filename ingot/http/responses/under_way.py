"""The responses under way, of all models."""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

from ingot.http.streaming_feed import HELD, Feed


class Owned(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def tenant(self) -> str: ...


R = TypeVar("R", bound=Owned)


LATELY: Final = 16  # responses that ended without their clients, whose events are held


class Runs(Generic[R]):
    """By their ids. Each tenant sees its own."""

    def __init__(self) -> None:
        self._runs: dict[str, R] = {}
        self._lately: dict[str, tuple[str, Feed]] = {}  # tenants and events by ids, the newest last

    def add(self, run: R) -> None:
        self._runs[run.id] = run

    def remove(self, run: R) -> None:
        self._runs.pop(run.id, None)

    def end(self, run: R, feed: Feed) -> None:
        """Remove it, and hold its events for clients that lost it and come again."""
        self.remove(run)
        self._lately[run.id] = (run.tenant, feed)
        while len(self._lately) > LATELY or sum(len(held) for _, held in self._lately.values()) > HELD:
            self.forget(next(iter(self._lately)))

    def forget(self, response_id: str) -> None:
        self._lately.pop(response_id, None)

    def find(self, tenant: str, response_id: str) -> R | None:
        run = self._runs.get(response_id)
        return run if run is not None and run.tenant == tenant else None

    def ended_lately(self, tenant: str, response_id: str) -> Feed | None:
        """The events of one that ended without its client."""
        owner, feed = self._lately.get(response_id, ("", None))
        return feed if owner == tenant else None
