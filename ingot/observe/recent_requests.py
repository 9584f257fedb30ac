"""The newest requests that ended: how long each of their phases took, and how they went, by tenant and id. For one
thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

REMEMBERED_SPANS: Final = 512


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Seconds that a request waited, that its prompt took and its answers did; `ended` is on time.monotonic()'s clock.
    Nothing of what was asked or answered."""

    id: str
    tenant: str
    path: str
    outcome: str
    ended: float
    queued_s: float
    prompt_s: float
    answer_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def took_s(self) -> float:
        return self.queued_s + self.prompt_s + self.answer_s


class RequestTimeline:
    """For one thread."""

    def __init__(self, most: int = REMEMBERED_SPANS) -> None:
        self._spans: deque[RequestSpan] = deque(maxlen=most)

    def add(self, span: RequestSpan) -> None:
        self._spans.append(span)

    def since(self, then: float) -> Iterator[RequestSpan]:
        """Those that ended after `then`, the newest first."""
        for span in reversed(self._spans):
            if span.ended < then:
                return
            yield span


T = TypeVar("T")
REMEMBERED_BY_TENANT: Final = 512


class RecentByTenant(Generic[T]):
    """Each tenant has room of its own, so that a busy one makes nobody else's be forgotten. For one thread."""

    def __init__(self, most: int = REMEMBERED_BY_TENANT) -> None:
        self._most = most
        self._kept: dict[str, OrderedDict[str, T]] = {}

    def add(self, tenant: str, id: str, value: T) -> None:
        own = self._kept.setdefault(tenant, OrderedDict())
        own[id] = value
        own.move_to_end(id)
        if len(own) > self._most:
            own.popitem(last=False)

    def get(self, tenant: str, id: str) -> T | None:
        return self._kept.get(tenant, OrderedDict()).get(id)
