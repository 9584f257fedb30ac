"""Who goes when there is no room for all: the least worth of whoever holds more than its share, pinned ones last."""

from __future__ import annotations

import itertools
from collections.abc import Container
from dataclasses import dataclass
from math import inf

from ingot.cache.tree import Node

MOST_USES = 16
"""Uses beyond which a node is worth no more: what many share stays long, and is forgotten in the end."""


def worth_of(node: Node, seconds: float, nbytes: int) -> float:
    """Of so many bytes of a node that take so many seconds to get back."""
    return node.touched + min(1 + node.uses, MOST_USES) * seconds / max(1, nbytes)


def removable(node: Node) -> bool:
    """What nothing in memory goes on from can go; what something does can give up its checkpoint."""
    return node.record is not None and (node.is_last_in_memory or node.has_checkpoint)


@dataclass(eq=False, slots=True)
class Queued:
    """A node in a queue, and what it was worth when it was put there."""

    node: Node
    rank: tuple[bool, float, int, int]
    place: int = 0

    @property
    def worth(self) -> float:
        return self.rank[1]


class EvictionQueue:
    """What may go, each node once, by tenant: the least worth first, and of those that are worth the same the one not
    used longest. Nothing here looks at all nodes: putting one in, moving it and taking it out take O(log n)."""

    def __init__(self) -> None:
        self._heaps: dict[str, _Heap] = {}
        self._queued: dict[Node, Queued] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, node: object) -> bool:
        return node in self._queued

    def worth(self, node: Node) -> float:
        """What it was worth when it was put here."""
        return self._queued[node].worth if node in self._queued else inf

    def put(self, node: Node, worth: float) -> None:
        """Have a node in its place, wherever it was before."""
        self.remove(node)
        added = self._queued[node] = Queued(node, (node.pinned, worth, node.turn, next(self._order)))
        self._heaps.setdefault(node.tenant, _Heap()).add(added)

    def remove(self, node: Node) -> None:
        """Take a node out, if it is here."""
        queued = self._queued.pop(node, None)
        if queued is not None:
            heap = self._heaps[node.tenant]
            heap.remove(queued)
            if heap.first is None:
                del self._heaps[node.tenant]

    def first(self, exceeding: Container[str]) -> tuple[tuple[bool, bool, float], Queued] | None:
        """The next to go, where tenants that are `exceeding` their share come first, and how that ranks among those of
        other queues. It stays here."""
        found = ((heap.first, tenant not in exceeding) for tenant, heap in self._heaps.items())
        ranked = (((queued.rank[0], within, queued.worth), queued) for queued, within in found if queued is not None)
        return min(ranked, key=lambda each: each[0], default=None)

    def check(self) -> None:
        assert len(self) == sum(heap.check() for heap in self._heaps.values()), "a queue has lost a node"


class _Heap:
    """A binary heap whose members know their places, so that any of them can be taken out."""

    def __init__(self) -> None:
        self._members: list[Queued] = []

    @property
    def first(self) -> Queued | None:
        return self._members[0] if self._members else None

    def add(self, member: Queued) -> None:
        self._members.append(member)
        self._rise(member, len(self._members) - 1)

    def remove(self, member: Queued) -> None:
        last = self._members.pop()
        if last is not member:
            self._rise(last, member.place)
            self._sink(last, last.place)

    def _rise(self, member: Queued, place: int) -> None:
        while place and member.rank < (above := self._members[(place - 1) // 2]).rank:
            self._set(above, place)
            place = (place - 1) // 2
        self._set(member, place)

    def _sink(self, member: Queued, place: int) -> None:
        while below := self._members[2 * place + 1 : 2 * place + 3]:
            least = min(below, key=lambda each: each.rank)
            if member.rank < least.rank:
                break
            hole = least.place
            self._set(least, place)
            place = hole
        self._set(member, place)

    def _set(self, member: Queued, place: int) -> None:
        self._members[place] = member
        member.place = place

    def check(self) -> int:
        """How many there are."""
        for place, member in enumerate(self._members):
            assert (member.place == place and self._members[(place - 1) // 2].rank <= member.rank) or not place
        return len(self._members)
