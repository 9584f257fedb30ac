"""How much each key may ask for in a minute: requests, and tokens of prompts and answers.

A minute's worth is there at the beginning, and flows back evenly. What a request costs in tokens is known only when it
is over, so that one may take more than is left: the next then waits until that has flowed back. For one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from ingot.config import ApiKey
from ingot.errors import RateLimited

MINUTE_S: Final = 60.0
What = Literal["requests", "tokens"]
HEADERS: Final = tuple(
    f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in ("limit", "remaining")
)


@dataclass(slots=True)
class Allowance:
    """What is left of so many a minute."""

    limit: int
    since: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.limit

    def flow(self, now: float) -> None:
        self.left = min(self.limit, self.left + (now - self.since) * self.limit / MINUTE_S)
        self.since = now

    def missing_s(self, wanted: float) -> float:
        """How long it takes until `wanted` are there."""
        return max(0.0, (wanted - self.left) * MINUTE_S / self.limit)


class Rates:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, What], Allowance] = {}

    def admit(self, tenant: str, key: ApiKey) -> None:
        """Take a request in. Raises RateLimited where the minute's requests or tokens are used up."""
        allowances = dict(self._allowances(tenant, key))
        for what, allowance in allowances.items():
            if (seconds := allowance.missing_s(1.0)) > 0:
                raise RateLimited(
                    f"This key may use {allowance.limit} {what} a minute, and has.", retry_after=max(1.0, seconds)
                )
        if "requests" in allowances:
            allowances["requests"].left -= 1

    def charge(self, tenant: str, key: ApiKey, tokens: int) -> None:
        for what, allowance in self._allowances(tenant, key):
            if what == "tokens":
                allowance.left -= tokens

    def headers(self, tenant: str, key: ApiKey) -> list[tuple[str, str]]:
        """What is left, where OpenAI's clients look for it."""
        return [
            (f"x-ratelimit-{name}-{what}", str(value))
            for what, allowance in self._allowances(tenant, key)
            for name, value in (("limit", allowance.limit), ("remaining", max(0, int(allowance.left))))
        ]

    def _allowances(self, tenant: str, key: ApiKey) -> Iterator[tuple[What, Allowance]]:
        """Those that the key has, as they stand now. One whose limit was changed begins anew."""
        now = self._clock()
        limits: dict[What, int | None] = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        for what, limit in limits.items():
            if limit is None:
                self._kept.pop((tenant, what), None)
                continue
            kept = self._kept.get((tenant, what))
            if kept is None or kept.limit != limit:
                kept = self._kept[tenant, what] = Allowance(limit, now)
            kept.flow(now)
            yield what, kept
