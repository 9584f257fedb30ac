"""Eviction from the prefix index: which nodes go when there is no room for all.

Of tenants that exceed their share, the node of the least worth goes first; pinned nodes go last. With a codec, records
may be compressed instead (`CompressionPolicy`). Evicted prefixes are remembered as digests, in bounded memory, so that
an explanation can tell an evicted prefix from one that was never cached.

Checkpoints are thinned along a path, since each costs the same wherever it is, and a long conversation would collect
several at every message. Of checkpoints close together the first is enough. Beyond those that are shared or resumed
from, and the newest few, so many stay that whoever edits an earlier message recomputes at most three times the tokens
behind that edit. So their number grows with the logarithm of the path's length.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from math import inf
from typing import NamedTuple, Protocol

from ingot.cache.prefix_tree import PrefixNode
from ingot.cache.records import Record

MOST_USES = 16
"""Uses beyond which a node is worth no more, so that widely shared prefixes are evicted in the end."""


def eviction_worth(node: PrefixNode, seconds: float, nbytes: int) -> float:
    """What `nbytes` of a node are worth that take so many seconds to restore."""
    return node.touched + min(1 + node.uses, MOST_USES) * seconds / max(1, nbytes)


def is_removable(node: PrefixNode) -> bool:
    """A node without children in memory can be evicted; any other one can give up its checkpoint."""
    return node.record is not None and (node.is_last_in_memory or node.has_checkpoint)


class QueuedNode(NamedTuple):
    """A node in a queue, ranked by what it was worth when it was put there."""

    rank: tuple[bool, float, int, int]  # no two are equal
    node: PrefixNode

    @property
    def worth(self) -> float:
        return self.rank[1]


OUTDATED_ENTRIES = 64
"""Entries of a heap that may be outdated, however few are not."""


class EvictionQueue:
    """The nodes that may be evicted, a heap for each tenant: the least worth first, and of equal worth the least
    recently used. Adding, moving and removing a node take O(log n). Who is moved or removed leaves an outdated entry,
    which goes when it comes first, or when more than half of a heap is outdated."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[QueuedNode]] = {}
        self._queued: dict[PrefixNode, QueuedNode] = {}
        self._sizes: Counter[str] = Counter()  # of the heaps, without outdated entries
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, node: object) -> bool:
        return node in self._queued

    def worth(self, node: PrefixNode) -> float:
        """What it was worth when it was put here; infinite if it is not here."""
        return self._queued[node].worth if node in self._queued else inf

    def put(self, node: PrefixNode, worth: float) -> None:
        """Add a node, or move it."""
        self.remove(node)
        added = self._queued[node] = QueuedNode((node.pinned, worth, node.turn, next(self._order)), node)
        self._sizes[node.tenant] += 1
        heapq.heappush(self._heaps.setdefault(node.tenant, []), added)

    def remove(self, node: PrefixNode) -> None:
        if self._queued.pop(node, None) is None:
            return
        self._sizes[node.tenant] -= 1
        heap, size = self._heaps[node.tenant], self._sizes[node.tenant]
        if not size:
            del self._heaps[node.tenant], self._sizes[node.tenant]
        elif len(heap) > 2 * size + OUTDATED_ENTRIES:
            heap[:] = filter(self._is_current, heap)
            heapq.heapify(heap)

    def first(self, exceeding: Container[str]) -> tuple[tuple[bool, bool, float], QueuedNode] | None:
        """The rank among other queues and the node that goes next, where tenants `exceeding` their share come first. It
        stays in the queue."""
        for heap in self._heaps.values():
            while not self._is_current(heap[0]):
                heapq.heappop(heap)
        firsts = ((heap[0], tenant not in exceeding) for tenant, heap in self._heaps.items())
        ranked = (((queued.rank[0], within, queued.worth), queued) for queued, within in firsts)
        return min(ranked, key=lambda each: each[0], default=None)

    def check(self) -> None:
        current = {tenant: sum(map(self._is_current, heap)) for tenant, heap in self._heaps.items()}
        assert current == self._sizes and len(self) == self._sizes.total(), "a queue has lost a node"

    def _is_current(self, entry: QueuedNode) -> bool:
        return self._queued.get(entry.node) is entry


CLOSE_TOKENS = 32
"""Computing this many tokens takes about as long as restoring a checkpoint."""
NEWEST_CHECKPOINTS = 4
NEAR_TOKENS = 256
"""Distances from the path's end below this count as this."""
SPREAD_FACTOR = 3
"""Two checkpoints may lie this many times as far apart as the nearer one is from the path's end."""
SHARED_RESUMES = 2
"""Resumed sequences from which on a checkpoint counts as shared; a conversation's own next turn is one."""


def superfluous_checkpoints(end: PrefixNode) -> Iterable[PrefixNode]:
    """Nodes on the path to `end` that should give up their checkpoints."""
    apart: list[PrefixNode] = []
    for node in (node for node in end.path[:-1] if node.has_checkpoint):
        if apart and node.end - apart[-1].end < CLOSE_TOKENS and not is_shared_checkpoint(node):
            yield node
        else:
            apart.append(node)
    previous: PrefixNode | None = None
    for node, nearer in pairwise(apart[: 1 - NEWEST_CHECKPOINTS]):
        # As the path grows, distances from its end grow and gaps do not: a gap that is allowed now stays so.
        gap = SPREAD_FACTOR * max(NEAR_TOKENS, end.end - nearer.end)
        if previous is not None and nearer.end - previous.end <= gap and not is_shared_checkpoint(node):
            yield node
        else:
            previous = node


def is_shared_checkpoint(node: PrefixNode) -> bool:
    return node.landmark or node.pinned or node.resumed >= SHARED_RESUMES or len(node.children) > 1


class CompressionPolicy(Protocol):
    def may(self, node: PrefixNode) -> bool:
        """Whether a node's record may be compressed and is not yet."""

    def least(self, node: PrefixNode) -> int:
        """Bytes of its record when it is compressed."""

    def saves(self, node: PrefixNode) -> int:
        """Bytes that compressing it now would free."""

    def compress_record(self, node: PrefixNode) -> Record: ...

    def seconds(self, node: PrefixNode) -> float:
        """How long decoding it again would take."""


EVICTED_HEAD = 32
"""An evicted node counts as part of a prompt when this many of its first tokens, or all of a shorter one, match."""
REMEMBERED_PREFIXES = 8192


class EvictedPrefixes:
    def __init__(self, most: int = REMEMBERED_PREFIXES) -> None:
        self._most = most
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, owner: Sequence[str], prefix: Sequence[int], tokens: Sequence[int]) -> None:
        """`tokens` were cached behind `prefix`, and are not any more."""
        digest = _prefix_digest(owner, prefix)
        digest.update(_token_bytes(tokens[:EVICTED_HEAD]))
        self._digests[digest.digest()] = None
        self._digests.move_to_end(digest.digest())
        if len(self._digests) > self._most:
            self._digests.popitem(last=False)

    def holds(self, owner: Sequence[str], tokens: Sequence[int], matched: int) -> bool:
        """Whether a node was evicted that continued the first `matched` of `tokens` as they go on."""
        if not self._digests:
            return False
        digest = _prefix_digest(owner, tokens[:matched])
        for token in tokens[matched : matched + EVICTED_HEAD]:
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
