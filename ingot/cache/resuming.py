"""From where along a path computing can go on: the longest prefix of which every kind of layer has what it needs.

What a node has may be in memory or on disk; a *tier* says how far down is looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ingot.cache.matches import Needs
from ingot.cache.tree import Node

Tier = Literal["ram", "disk"]


@dataclass(frozen=True, slots=True)
class Reach:
    """The first `resident` tokens of a prompt can be resumed from memory, the first `length` if what these nodes have
    on disk were there."""

    resident: int
    length: int
    lacking: tuple[Node, ...]


def holds(node: Node, tier: Tier) -> bool:
    return node.record is not None or (tier == "disk" and node.is_filed)


def within(nodes: Sequence[Node], tier: Tier) -> list[Node]:
    """Those at the path's beginning that have something there."""
    found: list[Node] = []
    for node in nodes:
        if not holds(node, tier):
            break
        found.append(node)
    return found


def resumable(nodes: Sequence[Node], known: int, limit: int, needs: Needs, tier: Tier) -> tuple[int, int]:
    """(length, number of nodes) of the longest prefix from which computing can go on."""
    path = within(nodes, tier)
    known = min(known, path[-1].end) if path else 0
    if needs.anywhere:
        length = min(known, limit)
        return length, sum(node.begin < length for node in path)
    for depth in range(len(path), 0, -1):
        end = path[depth - 1].end
        if end <= min(known, limit) and is_complete(path[:depth], needs, tier):
            return end, depth
    return 0, 0


def is_complete(path: Sequence[Node], needs: Needs, tier: Tier) -> bool:
    if needs.checkpoint and not _has_checkpoint(path[-1], tier):
        return False
    return all(sees(path, group, path[-1].end - window + 1) for group, window in needs.windows)


def sees(path: Sequence[Node], group: int, place: int) -> bool:
    """Whether window layers have all tokens from `place` to the path's end."""
    for node in reversed(path):
        held = node.record or node.filed
        assert held is not None
        oldest = held.oldest(group)
        if oldest <= max(0, place):
            return True
        if oldest > node.begin:
            return False
    return True


def _has_checkpoint(node: Node, tier: Tier) -> bool:
    return node.has_checkpoint or (tier == "disk" and node.has_filed_checkpoint)
