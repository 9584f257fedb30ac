"""The most recent requests that ended: how long each of their phases took, and their outcomes, by tenant and id. For
one thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

REMEMBERED_SPANS: Final = 512


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """Seconds that a request waited, and that its prefill and decode took; `ended` is of time.monotonic(). Holds
    nothing of its prompt or answer."""

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
    def __init__(self, most: int = REMEMBERED_SPANS) -> None:
        self._spans: deque[RequestSpan] = deque(maxlen=most)

    def add(self, span: RequestSpan) -> None:
        self._spans.append(span)

    def since(self, then: float) -> Iterator[RequestSpan]:
        """Those that ended after `then`, newest first."""
        for span in reversed(self._spans):
            if span.ended < then:
                return
            yield span


T = TypeVar("T")
REMEMBERED_BY_TENANT: Final = 512


class RecentByTenant(Generic[T]):
    """Each tenant has room of its own, so that a busy one does not displace others'."""

    def __init__(self, most: int = REMEMBERED_BY_TENANT) -> None:
        self._most = most
        self._by_tenant: dict[str, OrderedDict[str, T]] = {}

    def add(self, tenant: str, id: str, value: T) -> None:
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        own[id] = value
        own.move_to_end(id)
        if len(own) > self._most:
            own.popitem(last=False)

    def get(self, tenant: str, id: str) -> T | None:
        return self._by_tenant.get(tenant, OrderedDict()).get(id)
