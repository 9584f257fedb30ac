"""Who holds how much of what is kept, and who has to give way when it is too much.

Tenants that came lately share the room equally. A share that its tenant does not fill is lent to whoever needs it, and
taken back when the tenant does; that of one who has not come for a while is lent as a whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

IDLE_S = 900.0
"""Seconds without a prompt after which a tenant's share is lent as a whole."""


class Shares:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._came: dict[str, float] = {}
        self.held: Counter[str] = Counter()  # bytes
        self.evictions: Counter[str] = Counter()
        self.total = 0

    def come(self, tenant: str) -> None:
        """A tenant has something to look up or to keep."""
        self._came[tenant] = self._clock()

    def add(self, tenant: str, nbytes: int) -> None:
        """A tenant holds so many bytes more, or fewer."""
        self.total += nbytes
        self.held[tenant] += nbytes
        if not self.held[tenant]:
            del self.held[tenant]

    def exceeding(self, most: int) -> set[str]:
        """Who holds more than its share of `most` bytes. Somebody does, where all together hold more than that."""
        since = self._clock() - IDLE_S
        active = {tenant for tenant in self.held if self._came.get(tenant, since) > since}
        share = most / max(1, len(active))
        return {tenant for tenant, held in self.held.items() if tenant not in active or held > share}
