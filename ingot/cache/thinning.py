"""Which checkpoints along a path are worth their bytes.

A checkpoint costs as much wherever it stands, and a long conversation would gather several at every message. Of those
that stand close together the first is enough. Kept are then the ones that somebody shares or goes back to, the newest
few, and of the others so many that whoever goes back computes at most three times as much again as was changed. So
their number grows with the logarithm of the path's length.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from ingot.cache.tree import Node

CLOSE = 32
"""Tokens that are as soon computed as a checkpoint is restored."""
NEWEST = 4
NEAR = 256
"""Tokens from the end within which distances are not told apart."""
SPREAD = 3
"""Two checkpoints may lie this many times as far apart as the nearer one is from the path's end."""
SHARED = 2
"""Sequences that went on from a checkpoint before it counts as shared: a conversation's own next turn is one."""


def superfluous(end: Node) -> Iterable[Node]:
    """Nodes on the path to `end` that should give up their checkpoints."""
    apart: list[Node] = []
    for node in (node for node in end.path[:-1] if node.has_checkpoint):
        if apart and node.end - apart[-1].end < CLOSE and not is_shared(node):
            yield node
        else:
            apart.append(node)
    kept: Node | None = None
    for node, nearer in pairwise(apart[: 1 - NEWEST]):
        # As the path grows, distances do and gaps do not: what may lie apart now may do so for good.
        gap = SPREAD * max(NEAR, end.end - nearer.end)
        if kept is not None and nearer.end - kept.end <= gap and not is_shared(node):
            yield node
        else:
            kept = node


def is_shared(node: Node) -> bool:
    return node.landmark or node.pinned or node.resumed >= SHARED or len(node.children) > 1
