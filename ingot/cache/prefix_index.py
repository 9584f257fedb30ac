"""The prefix index: a radix tree of cached tokens for each owner, on the forest of `prefix_tree.py`.

A node covers tokens [begin, end) of its path and has a record of them, in memory, on disk, or both. The contract:

- `match` finds the longest cached prefix of a prompt, and the furthest point in it from which computing can resume: the
  longest prefix for which every kind of layer has what it needs in memory. It only updates how recently nodes were
  used.
- `peek` finds the same and changes nothing; `explain` also says why it went no further.
- `insert` adds what a sequence computed beyond what is cached. Nothing is stored twice.
- `pin` locks a prefix: it is evicted only when nothing else is left.
- `add_disk_entry` adds a record that is on disk; `reach` finds the records on disk that a prompt could use; `fill`
  loads one.
- `shrink` evicts down to a number of bytes, from tenants that exceed their share first. Nodes go in order of worth: the
  time to compute them again per byte, times how often they were used, discounted with age. An evicted record is
  offloaded to disk if possible. With a codec, a record may be compressed instead of evicted; what it is worth then
  follows from the time that decoding takes.
- `check` raises if the accounts are wrong.

Pure Python: of a record it uses only its size, its split, and which layers it covers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ingot.cache.codecs.names import RAW
from ingot.cache.disk.index import DiskEntry
from ingot.cache.prefix_eviction import (
    CompressionPolicy,
    EvictedPrefixes,
    EvictionQueue,
    QueuedNode,
    eviction_worth,
    is_removable,
    superfluous_checkpoints,
)
from ingot.cache.prefix_tree import CacheOwner, PrefixForest, PrefixNode, outline_prefixes
from ingot.cache.records import Record
from ingot.shares import Shares

OTHER_OWNER_TOKENS = 16
"""How many more tokens must be cached under another salt or adapter for that to be the reason of a miss."""
RESUME_GAP_TOKENS = 64
"""How many cached tokens must be unusable for want of a resume point for that to be the reason, unless all are
cached."""
SNIPPET_TOKENS = 12
"""Tokens of the cached continuation that an explanation shows."""
MOST_OTHER_OWNERS = 64
"""How many other owners of the same tenant an explanation compares with."""
SWEPT_NODES = 32
"""Nodes that each `shrink` checks for lost files."""
REWEIGHED_NODES = 64
"""Nodes at most whose worth each `shrink` computes anew, since cost estimates change over time."""
MOST_REFUSALS = 64
"""After so many nodes that could not be compressed, `shrink` only evicts."""
NO_COMPRESSOR: Final = None

MakeRecord = Callable[[int, int], Record]
OffloadNode = Callable[[PrefixNode], bool]
"""Makes sure that a node's record is on disk and sets the node's disk record. False where that is not possible now."""


class PrefixIndex(PrefixForest):
    def __init__(
        self,
        needs: ResumeNeeds,
        cost: Callable[[int], float],
        clock: Callable[[], float] = time.monotonic,
        offload: OffloadNode = lambda node: False,
        compressor: CompressionPolicy | None = NO_COMPRESSOR,
    ) -> None:
        """`cost(n)` is the time in seconds that computing n tokens takes."""
        super().__init__(Shares("prefix cache", clock=clock), self._queue)
        self._needs, self._cost, self._offload, self._compressor = needs, cost, offload, compressor
        self._evicted = EvictedPrefixes()
        self._clock, self._turns = 0.0, itertools.count()
        self._evictable = EvictionQueue()  # by the cost of computing a node again
        self._compressible = EvictionQueue()  # by the cost of decoding it

    @property
    def nbytes(self) -> int:
        return self.shares.total

    # Match

    def match(self, owner: CacheOwner, tokens: Sequence[int], limit: int) -> PrefixMatch:
        """The cached prefix of `tokens`. At most the first `limit` are offered, so that something is left to
        compute."""
        self.shares.come(owner.tenant)
        nodes, matched = self.walk(owner, tokens)
        for node in nodes:
            node.uses += 1
            self._touch(node)
        length, depth = resumable_prefix(nodes, matched, limit, self._needs, "ram")
        if depth and nodes[depth - 1].end == length:
            nodes[depth - 1].resumed += 1
        return PrefixMatch(matched, length, _records_of(nodes[:depth]))

    def peek(self, owner: CacheOwner, tokens: Sequence[int], limit: int) -> PrefixMatch:
        """What `match` would return now. Changes nothing."""
        nodes, matched = self.walk(owner, tokens)
        length, depth = resumable_prefix(nodes, matched, limit, self._needs, "ram")
        return PrefixMatch(matched, length, _records_of(nodes[:depth]))

    def records(self, owner: CacheOwner, tokens: Sequence[int]) -> list[Record]:
        """The records in memory along `tokens`, whether one can resume from them or not."""
        return list(_records_of(self.along(owner, tokens)))

    def along(self, owner: CacheOwner, tokens: Sequence[int]) -> list[PrefixNode]:
        """The nodes that `tokens` pass through. The last one may match only in part."""
        return self.walk(owner, tokens)[0]

    def resident(self, owner: CacheOwner, tokens: Sequence[int]) -> int:
        """How many of `tokens` are in memory, whether one can resume there or not."""
        nodes, matched = self.walk(owner, tokens)
        path = nodes_within_tier(nodes, "ram")
        return min(matched, path[-1].end) if path else 0

    def explain(
        self, owner: CacheOwner, tokens: Sequence[int], limit: int, tier: CacheTier = "ram"
    ) -> MatchExplanation:
        """What `match` would return now and why no more; with tier "disk", as if all that is on disk were in memory."""
        nodes, matched = self.walk(owner, tokens)
        length, depth = resumable_prefix(nodes, matched, limit, self._needs, tier)
        theirs = _continuation(nodes[-1], matched) if nodes and matched < len(tokens) else ()
        disk_record = sum(min(node.end, length) - node.begin for node in nodes[:depth] if node.record is None)
        gap = min(matched, limit) - length
        if gap >= RESUME_GAP_TOKENS or (gap and matched >= limit):
            lost = any(node.lost or node.record is None for node in nodes[depth:] if node.end <= matched)
            reason: MissReason = "evicted" if lost else "checkpoint"
        else:
            reason = self._miss_reason(owner, tokens, limit, matched, theirs)
        return MatchExplanation(
            matched, length, reason, theirs, disk_record, codec_of_records(_records_of(nodes[:depth]))
        )

    def _miss_reason(
        self, owner: CacheOwner, tokens: Sequence[int], limit: int, matched: int, theirs: tuple[int, ...]
    ) -> MissReason:
        if matched >= limit:
            return "complete"
        if self._evicted.holds(owner.words, tokens, matched):
            return "evicted"
        if (
            self._matched_elsewhere(owner, tokens, lambda other: other.salt != owner.salt) - matched
            >= OTHER_OWNER_TOKENS
        ):
            return "salt"
        if (
            self._matched_elsewhere(owner, tokens, lambda other: other.lora != owner.lora) - matched
            >= OTHER_OWNER_TOKENS
        ):
            return "adapter"
        if theirs:
            return "diverged"
        return "new_turn" if matched else "unseen"

    def _matched_elsewhere(
        self, owner: CacheOwner, tokens: Sequence[int], differs: Callable[[CacheOwner], bool]
    ) -> int:
        """The longest match of `tokens` under another owner of the same tenant that `differs` selects."""
        others = itertools.islice(filter(differs, self.owners(owner.tenant)), MOST_OTHER_OWNERS)
        return max((self.walk(other, tokens)[1] for other in others), default=0)

    def outline(self, tenant: str, most: int) -> list[tuple[PrefixNode, int | None, int]]:
        """A tenant's most used nodes; see `outline_prefixes`."""
        return outline_prefixes(self.roots(tenant), most)

    # Disk

    def add_disk_entry(self, owner: CacheOwner, tokens: Sequence[int], entry: DiskEntry) -> bool:
        """Add a record on disk of the last of `tokens`. False where the prefix that it continues is not in the
        index."""
        prefix = tuple(tokens[: entry.begin])
        if self.walk(owner, prefix)[1] < entry.begin:
            return False
        parent = self.ending(self.root(owner), prefix)
        assert parent is not None, "the prefix was just found"
        self.add_entry(parent, entry)
        return True

    def add_disk_entries(self, owner: CacheOwner, found: Iterable[tuple[DiskEntry, DiskEntry | None]]) -> None:
        """Add records on disk, each with the earlier one that it continues, from its end or from within it; None where
        it begins a path. Each entry is visited once, however long its path is."""
        parents: dict[DiskEntry, PrefixNode] = {}
        for entry, earlier in found:
            start = self.root(owner) if earlier is None else parents.get(earlier)
            gap = () if earlier is None else earlier.tokens[: entry.begin - earlier.begin]
            parent = None if start is None else self.ending(start, gap)
            if parent is not None and parent.end == entry.begin:
                parents[entry] = parent
                self.add_entry(parent, entry)

    def reach(self, owner: CacheOwner, tokens: Sequence[int], limit: int) -> PrefixReach:
        """What loading from disk would add to a match."""
        nodes, matched = self.walk(owner, tokens)
        resident, _ = resumable_prefix(nodes, matched, limit, self._needs, "ram")
        length, depth = resumable_prefix(nodes, matched, limit, self._needs, "disk")
        path = nodes[:depth]
        for node in path:
            self._touch(node)  # what is in memory must stay until the others are loaded
        lacking = [node for node in path if node.record is None]
        if path and self._needs.checkpoint and path[-1].record is not None and not path[-1].has_checkpoint:
            lacking.append(path[-1])
        return PrefixReach(resident, length, tuple(lacking))

    def fill(self, node: PrefixNode, record: Record) -> None:
        """Put a record in memory that was computed or read from disk, or one that holds more than the one before."""
        self.hold(node, record)
        node.lost = False
        self._touch(node)

    # Insert

    def insert(
        self, owner: CacheOwner, tokens: Sequence[int], end: int, make: MakeRecord, *, landmark: bool = False
    ) -> Record | None:
        """Store the part of tokens[:end] that is not cached yet; `make(begin, back)` returns the record of [begin, end)
        whose windows reach back to `back`. Nodes that were only on disk are in memory afterwards.

        Returns the new record, or None when there is nothing new. A `landmark` is an end that others will share.
        """
        self.shares.come(owner.tenant)
        tokens = tuple(tokens[:end])
        nodes, matched = self.walk(owner, tokens)
        absent = [node for node in nodes if node.record is None]
        if matched == end and not absent and self._needs.anywhere:
            return None
        if nodes and matched < nodes[-1].end:
            upper = self.split(nodes[-1], matched)
            absent = [upper if node is nodes[-1] else node for node in absent]
            nodes[-1] = upper
        if matched == end and not absent:
            nodes[-1].landmark |= landmark
            return self._refresh(nodes[-1], make)
        begin = absent[0].begin if absent else matched
        record = made = make(begin, self._window_begin(nodes_within_tier(nodes, "ram"), begin, end))
        if matched < end:
            parent = nodes[-1] if nodes else self.root(owner)
            absent.append(PrefixNode(parent, tokens[matched:end], None, end))
            parent.children[tokens[matched]] = absent[-1]
        for node in absent[:-1]:
            own, record = record.split(node.end)
            self.fill(node, own)
        self.fill(absent[-1], record)
        absent[-1].landmark |= landmark
        self._thin_checkpoints(absent[-1])
        return made

    def _window_begin(self, path: Sequence[PrefixNode], begin: int, end: int) -> int:
        """Where the windows of a record of [begin, end) begin: at `begin` if the path before it has what they see of
        earlier tokens. Otherwise they reach back to 0, as where a branch leaves from within a record."""
        firsts = [(group, end - window + 1) for group, window in self._needs.windows]
        return begin if all(first >= begin or windows_see(path, group, first) for group, first in firsts) else 0

    def _refresh(self, node: PrefixNode, make: MakeRecord) -> Record | None:
        """All tokens are cached already. If one cannot resume at the node, for want of a checkpoint or of tokens that
        windows see, add what is missing."""
        path = node.path
        if node.record is None or can_resume_at_end(path, self._needs, "ram"):
            return None
        made = node.record.renewed(make(node.begin, self._window_begin(path[:-1], node.begin, node.end)))
        self.fill(node, made)
        self._thin_checkpoints(node)
        return made

    def _thin_checkpoints(self, node: PrefixNode) -> None:
        for spare in list(superfluous_checkpoints(node)):
            self._drop_checkpoint(spare)

    def _touch(self, node: PrefixNode) -> None:
        node.touched, node.turn = self._clock, next(self._turns)
        self._queue(node)

    # Lock

    def pin(self, owner: CacheOwner, tokens: Sequence[int]) -> int:
        """Keep the cached prefix of `tokens` while anything else can go. Returns how many tokens that is."""
        nodes, matched = self.walk(owner, tokens)
        if nodes and matched < nodes[-1].end:
            nodes[-1] = self.split(nodes[-1], matched)
        for node in nodes:
            self.pin_node(node)
        return matched

    def unpinned_bytes(self, owner: CacheOwner, tokens: Sequence[int]) -> int:
        """How many bytes pinning these tokens would add to `pinned_bytes`, at most."""
        nodes, _ = self.walk(owner, tokens)
        return sum(node.record.nbytes for node in nodes if not node.pinned and node.record is not None)

    # Evict

    def shrink(self, most: int, enough: Callable[[], bool] = lambda: True) -> None:
        """Evict until at most `most` bytes are held and `enough` returns true. For the latter, records that running
        sequences hold too are not evicted, as that would free nothing.

        Visits the evicted nodes, a bounded number of others, and those that running sequences hold."""
        if self.nbytes <= most and enough():
            return
        self.sweep(SWEPT_NODES)
        spared: list[PrefixNode] = []
        try:
            self._shrink(most, enough, spared)
        finally:
            for node in spared:
                self._queue(node)

    def _shrink(self, most: int, enough: Callable[[], bool], spared: list[PrefixNode]) -> None:
        """Nodes that have to stay for now are taken out of the queues and added to `spared`."""
        weighed = refused = 0
        while self.nbytes > most or not enough():
            found = self._next_victim(most, compress=refused < MOST_REFUSALS)
            if found is None:
                return
            queue, queued = found
            victim = queued.node
            if weighed < REWEIGHED_NODES:
                weighed += 1
                self._queue(victim)
                if queue.worth(victim) > queued.worth:
                    continue
            queue.remove(victim)
            spared.append(victim)  # whatever fails below; queueing an evicted node again does nothing
            if victim.record is None or (self.nbytes <= most and not victim.record.idle_bytes):
                continue
            if self._compress_node(victim, queued.worth):
                continue
            if queue is self._compressible:
                refused += 1
            elif is_removable(victim):
                self._clock = max(self._clock, queued.worth)
                self._evict(victim)

    def _next_victim(self, most: int, *, compress: bool) -> tuple[EvictionQueue, QueuedNode] | None:
        """The next node to evict, or to `compress` if that is allowed, and the queue it is in."""
        exceeding = self.shares.exceeding(most)
        queues = [self._compressible, self._evictable] if compress else [self._evictable]
        found = [(*first, queue) for queue in queues if (first := queue.first(exceeding)) is not None]
        if not found:
            return None
        _, queued, queue = min(found, key=lambda each: each[0])
        return queue, queued

    def _queue(self, node: PrefixNode) -> None:
        """Put a node into the queues it belongs to, by its worth as estimated now."""
        compressible = self._compressor is not None and self._compressor.may(node)
        if node.record is not None:
            # A record is compressed before it is evicted: only its smallest size counts.
            compressed = node.record.nbytes if self._compressor is None else self._compressor.least(node)
            node.worth = eviction_worth(node, self._cost(len(node.tokens)), compressed)
            if compressible and self._compressor is not None:
                seconds = min(self._compressor.seconds(node), self._cost(len(node.tokens)))
                worth = eviction_worth(node, seconds, node.record.nbytes - compressed)
                self._compressible.put(node, min(node.worth, worth))
        if not compressible:
            self._compressible.remove(node)
        if is_removable(node):
            self._evictable.put(node, node.worth)
        else:
            self._evictable.remove(node)

    def _compress_node(self, node: PrefixNode, worth: float) -> bool:
        """Release the pages of a node's record, if that frees anything. Returns whether it did."""
        if self._compressor is None or not self._compressor.may(node) or self._compressor.saves(node) <= 0:
            return False
        self._clock = max(self._clock, worth)
        self.hold(node, self._compressor.compress_record(node))
        return True

    def _evict(self, node: PrefixNode) -> None:
        """A node without children in memory leaves memory; any other one loses its checkpoint."""
        self.shares.evictions[node.tenant] += 1
        offloaded = self._offload(node)
        if not node.is_last_in_memory:
            self._drop_checkpoint(node)
            node.lost = not offloaded
        elif offloaded or node.is_on_disk:
            self.hold(node, None)
        else:
            assert node.parent is not None
            self._evicted.add(node.root_owner.words, node.parent.path_tokens, node.tokens)
            self.hold(node, None)
            self.prune(node)

    def _drop_checkpoint(self, node: PrefixNode) -> None:
        assert node.record is not None
        self.hold(node, node.record.without_checkpoint())

    def check(self) -> None:
        super().check()
        compressor = self._compressor
        queues: list[tuple[EvictionQueue, Callable[[PrefixNode], bool]]] = [(self._evictable, is_removable)]
        queues.append((self._compressible, lambda node: compressor is not None and compressor.may(node)))
        for queue, belongs in queues:
            queue.check()
            waiting = [node for node in self.nodes() if belongs(node)]
            assert len(queue) == len(waiting) and all(node in queue for node in waiting), "a queue is wrong"


def _records_of(path: Sequence[PrefixNode]) -> tuple[Record, ...]:
    return tuple(node.record for node in path if node.record is not None)


def _continuation(node: PrefixNode, matched: int) -> tuple[int, ...]:
    """The first cached tokens behind the first `matched` of a path that ends in or at the end of `node`."""
    tokens = node.tokens[matched - node.end + len(node.tokens) :] if matched < node.end else ()
    while len(tokens) < SNIPPET_TOKENS and node.children:
        node = max(node.children.values(), key=lambda child: child.worth)
        tokens += node.tokens
    return tokens[:SNIPPET_TOKENS]


MissReason = Literal["complete", "new_turn", "unseen", "diverged", "evicted", "checkpoint", "salt", "adapter"]


@dataclass(frozen=True, slots=True)
class ResumeNeeds:
    """What the model's layers need to resume: a checkpoint, and the tokens that each window still sees."""

    checkpoint: bool = False
    windows: tuple[tuple[int, int], ...] = ()  # (group of layers, window)

    @property
    def anywhere(self) -> bool:
        """A sequence can resume after any of its tokens, not only at a node's end."""
        return not self.checkpoint and not self.windows


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """`known` tokens of the prompt are in the index; the first `length` can be reused from `records`."""

    known: int = 0
    length: int = 0
    records: tuple[Record, ...] = ()

    @property
    def codec(self) -> str:
        return codec_of_records(self.records)


def codec_of_records(records: Iterable[Record]) -> str:
    """The codec that the records went through, or some of them."""
    return next((record.codec for record in records if record.codec != RAW), RAW)


@dataclass(frozen=True, slots=True)
class MatchExplanation:
    """Why a match is no longer. `theirs` are the first cached tokens where the prompt's own differ.

    - complete: all that may be offered is cached
    - new_turn: nothing that continues from there was cached
    - unseen: nothing that begins like the prompt was cached
    - diverged: what was cached continues differently
    - evicted: it was cached, and was evicted
    - checkpoint: more is cached, but this model can resume only where messages and chunks end or prompts diverged
    - salt, adapter: it is cached under another salt or adapter of the same tenant
    """

    known: int
    length: int
    reason: MissReason
    theirs: tuple[int, ...] = ()
    disk_record: int = 0  # tokens of the first `length` that would have to be read from disk
    codec: str = RAW  # what the others went through


CacheTier = Literal["ram", "disk"]


@dataclass(frozen=True, slots=True)
class PrefixReach:
    """The first `resident` tokens of a prompt can be resumed from memory; the first `length`, once the `lacking` nodes
    are loaded from disk."""

    resident: int
    length: int
    lacking: tuple[PrefixNode, ...]


def node_holds(node: PrefixNode, tier: CacheTier) -> bool:
    return node.record is not None or (tier == "disk" and node.is_on_disk)


def nodes_within_tier(nodes: Sequence[PrefixNode], tier: CacheTier) -> list[PrefixNode]:
    """The leading nodes of a path that are in a tier."""
    return list(itertools.takewhile(lambda node: node_holds(node, tier), nodes))


def resumable_prefix(
    nodes: Sequence[PrefixNode], matched: int, limit: int, needs: ResumeNeeds, tier: CacheTier
) -> tuple[int, int]:
    """(length, number of nodes) of the longest prefix from which computing can resume."""
    path = nodes_within_tier(nodes, tier)
    end = min(matched, limit, path[-1].end) if path else 0
    if needs.anywhere:
        return end, sum(node.begin < end for node in path)
    for depth in range(len(path), 0, -1):
        if path[depth - 1].end <= end and can_resume_at_end(path[:depth], needs, tier):
            return path[depth - 1].end, depth
    return 0, 0


def can_resume_at_end(path: Sequence[PrefixNode], needs: ResumeNeeds, tier: CacheTier) -> bool:
    last = path[-1]
    if needs.checkpoint and not (last.has_checkpoint or (tier == "disk" and last.has_disk_checkpoint)):
        return False
    return all(windows_see(path, group, last.end - window + 1) for group, window in needs.windows)


def windows_see(path: Sequence[PrefixNode], group: int, first: int) -> bool:
    """Whether window layers have all tokens from `first` to the path's end."""
    for node in reversed(path):
        record = node.record or node.disk_record
        assert record is not None
        oldest = record.oldest(group)
        if oldest <= max(0, first):
            return True
        if oldest > node.begin:
            return False
    return True
