"""A few nodes of the index, for people: those that were used most, with what they go on from."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from itertools import count

from ingot.cache.tree import Node


def outline(roots: Iterable[Node], most: int) -> list[tuple[Node, int | None, int]]:
    """At most so many nodes, each behind the one that it goes on from: the node, that one's place in the list, and how
    many that go on from it are left out. Looks at the listed ones and their children alone."""
    order = count()
    waiting: list[tuple[int, int, Node, int | None]] = []

    def offer(node: Node, parent: int | None) -> None:
        for child in node.children.values():
            heapq.heappush(waiting, (-child.uses, next(order), child, parent))

    for root in roots:
        offer(root, None)
    found: list[tuple[Node, int | None]] = []
    while waiting and len(found) < most:
        _, _, node, parent = heapq.heappop(waiting)
        found.append((node, parent))
        offer(node, len(found) - 1)
    listed = Counter(parent for _, parent in found)
    return [(node, parent, len(node.children) - listed[place]) for place, (node, parent) in enumerate(found)]
