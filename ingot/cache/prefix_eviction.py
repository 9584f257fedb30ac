"""Eviction from the prefix index: who goes when there is no room for all.

The least worth of whoever holds more than its share goes first, pinned nodes last. Records may be compressed instead,
where there is a codec (`CompressionPolicy`). What is gone is remembered as digests, in a bounded memory, so that a miss
can be told from a loss.

Checkpoints are thinned along a path: one costs as much wherever it stands, and a long conversation would gather several
at every message. Of those that stand close together the first is enough. Then those stay that somebody shares or goes
back to, the newest few, and of the others so many that whoever goes back computes at most three times as much again as
was changed. So their number grows with the logarithm of the path's length.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from math import inf
from typing import Protocol

from ingot.cache.prefix_tree import PrefixNode
from ingot.cache.records import Record

MOST_USES = 16
"""Uses beyond which a node is worth no more: what many share stays long, and is forgotten in the end."""


def eviction_worth(node: PrefixNode, seconds: float, nbytes: int) -> float:
    """Of so many bytes of a node that take so many seconds to get back."""
    return node.touched + min(1 + node.uses, MOST_USES) * seconds / max(1, nbytes)


def is_removable(node: PrefixNode) -> bool:
    """What nothing in memory goes on from can go; what something does can give up its checkpoint."""
    return node.record is not None and (node.is_last_in_memory or node.has_checkpoint)


@dataclass(eq=False, slots=True)
class QueuedNode:
    """A node in a queue, and what it was worth when it was put there."""

    node: PrefixNode
    rank: tuple[bool, float, int, int]
    place: int = 0

    @property
    def worth(self) -> float:
        return self.rank[1]


class EvictionQueue:
    """What may go, each node once, by tenant: the least worth first, and of those that are worth the same the one not
    used longest. Nothing here looks at all nodes: putting one in, moving it and taking it out take O(log n)."""

    def __init__(self) -> None:
        self._heaps: dict[str, _NodeHeap] = {}
        self._queued: dict[PrefixNode, QueuedNode] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, node: object) -> bool:
        return node in self._queued

    def worth(self, node: PrefixNode) -> float:
        """What it was worth when it was put here."""
        return self._queued[node].worth if node in self._queued else inf

    def put(self, node: PrefixNode, worth: float) -> None:
        """Have a node in its place, wherever it was before."""
        self.remove(node)
        added = self._queued[node] = QueuedNode(node, (node.pinned, worth, node.turn, next(self._order)))
        self._heaps.setdefault(node.tenant, _NodeHeap()).add(added)

    def remove(self, node: PrefixNode) -> None:
        """Take a node out, if it is here."""
        queued = self._queued.pop(node, None)
        if queued is not None:
            heap = self._heaps[node.tenant]
            heap.remove(queued)
            if heap.first is None:
                del self._heaps[node.tenant]

    def first(self, exceeding: Container[str]) -> tuple[tuple[bool, bool, float], QueuedNode] | None:
        """The next to go, where tenants that are `exceeding` their share come first, and how that ranks among those of
        other queues. It stays here."""
        found = ((heap.first, tenant not in exceeding) for tenant, heap in self._heaps.items())
        ranked = (((queued.rank[0], within, queued.worth), queued) for queued, within in found if queued is not None)
        return min(ranked, key=lambda each: each[0], default=None)

    def check(self) -> None:
        assert len(self) == sum(heap.check() for heap in self._heaps.values()), "a queue has lost a node"


class _NodeHeap:
    """A binary heap whose members know their places, so that any of them can be taken out."""

    def __init__(self) -> None:
        self._members: list[QueuedNode] = []

    @property
    def first(self) -> QueuedNode | None:
        return self._members[0] if self._members else None

    def add(self, member: QueuedNode) -> None:
        self._members.append(member)
        self._rise(member, len(self._members) - 1)

    def remove(self, member: QueuedNode) -> None:
        last = self._members.pop()
        if last is not member:
            self._rise(last, member.place)
            self._sink(last, last.place)

    def _rise(self, member: QueuedNode, place: int) -> None:
        while place and member.rank < (above := self._members[(place - 1) // 2]).rank:
            self._set(above, place)
            place = (place - 1) // 2
        self._set(member, place)

    def _sink(self, member: QueuedNode, place: int) -> None:
        while below := self._members[2 * place + 1 : 2 * place + 3]:
            least = min(below, key=lambda each: each.rank)
            if member.rank < least.rank:
                break
            hole = least.place
            self._set(least, place)
            place = hole
        self._set(member, place)

    def _set(self, member: QueuedNode, place: int) -> None:
        self._members[place] = member
        member.place = place

    def check(self) -> int:
        """How many there are."""
        for place, member in enumerate(self._members):
            assert (member.place == place and self._members[(place - 1) // 2].rank <= member.rank) or not place
        return len(self._members)


CLOSE_TOKENS = 32
"""Tokens that are as soon computed as a checkpoint is restored."""
NEWEST_CHECKPOINTS = 4
NEAR_TOKENS = 256
"""Tokens from the end within which distances are not told apart."""
SPREAD_FACTOR = 3
"""Two checkpoints may lie this many times as far apart as the nearer one is from the path's end."""
SHARED_RESUMES = 2
"""Sequences that went on from a checkpoint before it counts as shared: a conversation's own next turn is one."""


def superfluous_checkpoints(end: PrefixNode) -> Iterable[PrefixNode]:
    """Nodes on the path to `end` that should give up their checkpoints."""
    apart: list[PrefixNode] = []
    for node in (node for node in end.path[:-1] if node.has_checkpoint):
        if apart and node.end - apart[-1].end < CLOSE_TOKENS and not is_shared_checkpoint(node):
            yield node
        else:
            apart.append(node)
    kept: PrefixNode | None = None
    for node, nearer in pairwise(apart[: 1 - NEWEST_CHECKPOINTS]):
        # As the path grows, distances do and gaps do not: what may lie apart now may do so for good.
        gap = SPREAD_FACTOR * max(NEAR_TOKENS, end.end - nearer.end)
        if kept is not None and nearer.end - kept.end <= gap and not is_shared_checkpoint(node):
            yield node
        else:
            kept = node


def is_shared_checkpoint(node: PrefixNode) -> bool:
    return node.landmark or node.pinned or node.resumed >= SHARED_RESUMES or len(node.children) > 1


class CompressionPolicy(Protocol):
    def may(self, node: PrefixNode) -> bool:
        """Whether a node's record may be made smaller, and is not as small as it can be."""

    def least(self, node: PrefixNode) -> int:
        """Bytes that its record takes when it is."""

    def saves(self, node: PrefixNode) -> int:
        """Bytes that would be free, if it can be done now."""

    def compress_record(self, node: PrefixNode) -> Record:
        """Its record without them."""

    def seconds(self, node: PrefixNode) -> float:
        """How long getting it back as it is now would take."""


class NoCompressionPolicy:
    def may(self, node: PrefixNode) -> bool:
        return False

    def least(self, node: PrefixNode) -> int:
        assert node.record is not None
        return node.record.nbytes

    def saves(self, node: PrefixNode) -> int:
        return 0

    def compress_record(self, node: PrefixNode) -> Record:
        raise NotImplementedError

    def seconds(self, node: PrefixNode) -> float:
        return 0.0


EVICTED_HEAD = 32
"""A piece counts as the prompt's own when this many of its first tokens, or all of a shorter one, agree."""
REMEMBERED_PREFIXES = 8192


class EvictedPrefixes:
    def __init__(self, most: int = REMEMBERED_PREFIXES) -> None:
        self._most = most
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, owner: Sequence[str], before: Sequence[int], piece: Sequence[int]) -> None:
        """`piece` was kept behind the tokens `before` and is not any more."""
        digest = _prefix_digest(owner, before)
        digest.update(_token_bytes(piece[:EVICTED_HEAD]))
        self._digests[digest.digest()] = None
        self._digests.move_to_end(digest.digest())
        if len(self._digests) > self._most:
            self._digests.popitem(last=False)

    def holds(self, owner: Sequence[str], tokens: Sequence[int], known: int) -> bool:
        """Whether a piece that went on where the first `known` of `tokens` end, as they do, was evicted."""
        if not self._digests:
            return False
        digest = _prefix_digest(owner, tokens[:known])
        for token in tokens[known : known + EVICTED_HEAD]:
            digest.update(_token_bytes([token]))
            if digest.digest() in self._digests:
                return True
        return False


def _prefix_digest(owner: Sequence[str], tokens: Sequence[int]) -> blake2b:
    digest = blake2b(digest_size=16)
    for part in owner:
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    digest.update(_token_bytes(tokens))
    return digest


def _token_bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
