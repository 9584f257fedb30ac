"""Who goes when there is no room for all: the least worth of whoever holds more than its share, pinned ones last."""

from __future__ import annotations

import heapq
import itertools

from ingot.cache.shares import Shares
from ingot.cache.tree import Node

MOST_USES = 16
"""Uses beyond which a node is worth no more: what many share stays long, and is forgotten in the end."""


def worth_of(node: Node, seconds: float, nbytes: int) -> float:
    """Of so many bytes of a node that take so many seconds to get back."""
    return node.touched + min(1 + node.uses, MOST_USES) * seconds / max(1, nbytes)


def removable(node: Node) -> bool:
    """What nothing in memory goes on from can go; what something does can give up its checkpoint."""
    return node.record is not None and (node.is_last_in_memory or node.has_checkpoint)


class EvictionQueue:
    """What may go, by tenant, the least worth first, and of those that are worth the same the one not used longest."""

    def __init__(self, shares: Shares, most: int) -> None:
        """`most` bytes are shared out to tenants."""
        self._shares, self._most = shares, most
        self._loose: dict[str, list[tuple[bool, float, int, int, Node]]] = {}
        self._order = itertools.count()  # nodes do not compare

    def add(self, tenant: str, node: Node, worth: float) -> None:
        heapq.heappush(self._loose.setdefault(tenant, []), (node.pinned, worth, node.turn, next(self._order), node))

    def pop(self) -> tuple[str, float, Node] | None:
        """The next to go, whose it is and what it is worth; None when nobody is left."""
        tenants = [tenant for tenant, nodes in self._loose.items() if nodes]
        if not tenants:
            return None
        exceeding = self._shares.exceeding(self._most)

        def rank(tenant: str) -> tuple[bool, bool, float]:
            pinned, worth, *_ = self._loose[tenant][0]
            return pinned, tenant not in exceeding, worth

        tenant = min(tenants, key=rank)
        _, worth, _, _, node = heapq.heappop(self._loose[tenant])
        return tenant, worth, node
