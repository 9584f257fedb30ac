"""The newest requests that ended, and how long each of their phases took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

REMEMBERED: Final = 512


@dataclass(frozen=True, slots=True)
class Span:
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


class Timeline:
    """For one thread."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._spans: deque[Span] = deque(maxlen=most)

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def since(self, then: float) -> Iterator[Span]:
        """Those that ended after `then`, the newest first."""
        for span in reversed(self._spans):
            if span.ended < then:
                return
            yield span
