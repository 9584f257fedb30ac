"""Which checkpoints along a path are worth their bytes.

A checkpoint costs as much wherever it stands, and a long conversation would gather several at every message. Of those
that stand close together the first is enough. Kept are then the ones that somebody shares or goes back to, the newest
few, and of the others one for each doubling of the distance from the path's end: whoever goes back that far computes
at most about as much again as was changed. So their number grows with the logarithm of its length.
"""

from __future__ import annotations

from collections.abc import Iterable

from ingot.cache.tree import Node

CLOSE = 32
"""Tokens that are as soon computed as a checkpoint is restored."""
NEWEST = 4
NEAR = 256
"""Tokens from the end within which distances are not told apart."""
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
    spaced: set[int] = set()
    for node in apart[:-NEWEST]:
        # The furthest of each stretch stays: by the time it leaves, the next one has come to be the furthest.
        stretch = max(NEAR - 1, end.end - node.end).bit_length()
        if stretch in spaced and not is_shared(node):
            yield node
        spaced.add(stretch)


def is_shared(node: Node) -> bool:
    return node.landmark or node.pinned or node.resumed >= SHARED or len(node.children) > 1
