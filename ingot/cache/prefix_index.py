"""The prefix index: which prefixes of which sequences are computed already, and where each can be resumed.

A radix tree of tokens for each owner. A node covers tokens [begin, end) of its path and has a record of them, in
memory, on disk, or both. The contract:

- `match` finds how far a prompt is known and the furthest point from which it can be resumed: the longest one where
  every kind of layer has what it needs in memory. It changes nothing but how recently the nodes were used.
- `peek` finds the same without a trace; `explain` also says why it went no further.
- `plant` adds what is on disk; `reach` finds what of that a prompt could use, and `fill` brings it back.
- `insert` adds what a sequence computed beyond what is known; what is known already is not stored twice.
- `pin` keeps a prefix for as long as anything else can go instead.
- `shrink` evicts until the index holds no more than so many bytes, of tenants that hold more than their share: least
  worth first, where worth is the time it takes to compute again per byte, times how often it was used, and is
  forgotten with age. Pinned nodes go last. What is offloaded to disk first stays, as what it is there. With a codec,
  a record may be compressed instead, and is back as soon as it is decoded: that time is what its pages are worth.
- `check` raises if the accounts are wrong.

From where along a path computing can go on is the longest prefix of which every kind of layer has what it needs; a
*tier* says how far down is looked, in memory or on disk too. Pure Python: it asks of a record only its bytes, its
split, and what its layers hold.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ingot.cache.codecs.names import RAW
from ingot.cache.disk.index import DiskEntry
from ingot.cache.prefix_eviction import (
    CompressionPolicy,
    EvictedPrefixes,
    EvictionQueue,
    NoCompressionPolicy,
    QueuedNode,
    eviction_worth,
    is_removable,
    superfluous_checkpoints,
)
from ingot.cache.prefix_tree import CacheOwner, MemoryTally, PrefixForest, PrefixNode, outline_prefixes
from ingot.cache.records import Record
from ingot.shares import Shares

OTHER_OWNER_TOKENS = 16
"""Tokens that must be known under another salt before that is given as the reason."""
RESUME_GAP_TOKENS = 64
"""Tokens that a model must resume behind what is known before that is."""
SNIPPET_TOKENS = 12
"""Tokens of another continuation that an explanation shows."""
MOST_OTHER_OWNERS = 64
"""Other salts of a tenant that an explanation looks at."""
SWEPT_NODES = 32
"""Nodes that are looked at for lost files whenever room is made."""
REWEIGHED_NODES = 64
"""Nodes at most that are weighed anew whenever room is made. Costs are learned: what was weighed with others counts as
that once so many were."""
MOST_REFUSALS = 64
"""Nodes that cannot be made smaller now before no further ones are tried."""

NO_COMPRESSOR = NoCompressionPolicy()
MakeRecord = Callable[[int, int], Record]
OffloadNode = Callable[[PrefixNode], bool]
"""Sees to it that a node's record is on disk, and gives the node its file. False where that cannot be now."""


class PrefixIndex:
    def __init__(
        self,
        needs: ResumeNeeds,
        cost: Callable[[int], float],
        clock: Callable[[], float] = time.monotonic,
        spill: OffloadNode = lambda node: False,
        compressor: CompressionPolicy = NO_COMPRESSOR,
    ) -> None:
        """`cost(n)` is the time in seconds that computing n tokens takes."""
        self._needs, self._cost, self._spill, self._compressor = needs, cost, spill, compressor
        self._evicted = EvictedPrefixes()
        self._clock, self._turns = 0.0, itertools.count()
        self.shares = Shares("prefix cache", clock=clock)
        self._forest = PrefixForest(self.shares, self._queue)
        self._evictable = EvictionQueue()  # by what computing them again takes,
        self._compressible = EvictionQueue()  # and by what decoding them does

    @property
    def nbytes(self) -> int:
        return self.shares.total

    def recount(self) -> None:
        """Pages that records hold take less than before."""
        self._forest.recount()

    def match(self, owner: CacheOwner, tokens: Sequence[int], limit: int) -> PrefixMatch:
        """What of `tokens` is here. At most the first `limit` are offered, so that something is left to compute."""
        self.shares.come(owner.tenant)
        nodes, known = self._forest.walk(owner, tokens)
        for node in nodes:
            node.uses += 1
            self._touch(node)
        length, depth = resumable_prefix(nodes, known, limit, self._needs, "ram")
        if depth and nodes[depth - 1].end == length:
            nodes[depth - 1].resumed += 1
        return PrefixMatch(known, length, _records_of(nodes[:depth]))

    def peek(self, owner: CacheOwner, tokens: Sequence[int], limit: int) -> PrefixMatch:
        """What `match` would find now; changes nothing."""
        nodes, known = self._forest.walk(owner, tokens)
        length, depth = resumable_prefix(nodes, known, limit, self._needs, "ram")
        return PrefixMatch(known, length, _records_of(nodes[:depth]))

    def records(self, owner: CacheOwner, tokens: Sequence[int]) -> list[Record]:
        """What is in memory of `tokens`, whether it can be resumed or not."""
        return list(_records_of(self.along(owner, tokens)))

    def along(self, owner: CacheOwner, tokens: Sequence[int]) -> list[PrefixNode]:
        """The nodes that `tokens` pass through, the last one perhaps only in part."""
        return self._forest.walk(owner, tokens)[0]

    def resident(self, owner: CacheOwner, tokens: Sequence[int]) -> int:
        """How many of `tokens` are in memory, whether they can be resumed there or not."""
        nodes, known = self._forest.walk(owner, tokens)
        path = nodes_within_tier(nodes, "ram")
        return min(known, path[-1].end) if path else 0

    def explain(
        self, owner: CacheOwner, tokens: Sequence[int], limit: int, tier: CacheTier = "ram"
    ) -> MatchExplanation:
        """What `match` would find now, and why no more; or what it would with all that is on disk in memory."""
        nodes, known = self._forest.walk(owner, tokens)
        length, depth = resumable_prefix(nodes, known, limit, self._needs, tier)
        theirs = _continuation(nodes[-1], known) if nodes and known < len(tokens) else ()
        filed = sum(min(node.end, length) - node.begin for node in nodes[:depth] if node.record is None)
        codec = codec_of_records(_records_of(nodes[:depth]))
        if min(known, limit) - length >= RESUME_GAP_TOKENS:
            lost = any(node.lost or node.record is None for node in nodes[depth:] if node.end <= known)
            return MatchExplanation(known, length, "evicted" if lost else "checkpoint", theirs, filed, codec)
        return MatchExplanation(known, length, self._reason(owner, tokens, limit, known, theirs), theirs, filed, codec)

    # What is on disk

    def plant(self, owner: CacheOwner, tokens: Sequence[int], entry: DiskEntry) -> bool:
        """Know of a record on disk, of the last of `tokens`. False where nobody knows what it goes on from."""
        before = tuple(tokens[: entry.begin])
        if self._forest.walk(owner, before)[1] < entry.begin:
            return False
        behind = self._forest.ending(self._forest.planted(owner), before)
        assert behind is not None, "what was just found is gone"
        self._forest.plant(behind, entry)
        return True

    def plant_disk_entries(self, owner: CacheOwner, found: Iterable[tuple[DiskEntry, DiskEntry | None]]) -> None:
        """Know of records on disk, each with the one that it goes on from the end of, or from amid it, which comes
        before; None where it begins a path. Each is looked at once, however long its path is."""
        behind: dict[DiskEntry, PrefixNode] = {}
        for entry, after in found:
            start = self._forest.planted(owner) if after is None else behind.get(after)
            gap = () if after is None else after.tokens[: entry.begin - after.begin]
            place = None if start is None else self._forest.ending(start, gap)
            if place is not None and place.end == entry.begin:
                behind[entry] = place
                self._forest.plant(place, entry)

    def reach(self, owner: CacheOwner, tokens: Sequence[int], limit: int) -> PrefixReach:
        """What reading from disk would add to a match."""
        nodes, known = self._forest.walk(owner, tokens)
        resident, _ = resumable_prefix(nodes, known, limit, self._needs, "ram")
        length, depth = resumable_prefix(nodes, known, limit, self._needs, "disk")
        path = nodes[:depth]
        for node in path:
            self._touch(node)  # what is in memory of it is to stay until the rest is
        lacking = [node for node in path if node.record is None]
        if path and self._needs.checkpoint and path[-1].record is not None and not path[-1].has_checkpoint:
            lacking.append(path[-1])
        return PrefixReach(resident, length, tuple(lacking))

    def fill(self, node: PrefixNode, record: Record) -> None:
        """Have in memory what was computed or read from disk, or more of it than before."""
        self._forest.hold(node, record)
        node.lost = False
        self._touch(node)

    # Keeping

    def insert(
        self, owner: CacheOwner, tokens: Sequence[int], end: int, make: MakeRecord, *, landmark: bool = False
    ) -> Record | None:
        """Store what is known of tokens[:end] and not yet here; `make(begin, back)` gives the record of [begin, end),
        whose windows reach back to `back`. What was on disk alone is in memory afterwards.

        Returns the new record, or None when there is nothing new. A `landmark` is an end that others will share.
        """
        self.shares.come(owner.tenant)
        tokens = tuple(tokens[:end])
        nodes, known = self._forest.walk(owner, tokens)
        absent = [node for node in nodes if node.record is None]
        if known == end and not absent and self._needs.anywhere:
            return None
        if nodes and known < nodes[-1].end:
            upper = self._forest.split(nodes[-1], known)
            absent = [upper if node is nodes[-1] else node for node in absent]
            nodes[-1] = upper
        if known == end and not absent:
            nodes[-1].landmark |= landmark
            return self._refresh(nodes[-1], make)
        begin = absent[0].begin if absent else known
        made = make(begin, self._back(nodes_within_tier(nodes, "ram"), begin, end))
        if known < end:
            parent = nodes[-1] if nodes else self._forest.planted(owner)
            absent.append(PrefixNode(parent, tokens[known:end], None, end))
            parent.children[tokens[known]] = absent[-1]
        self._fill_nodes(made, absent)
        absent[-1].landmark |= landmark
        self._thin(absent[-1])
        return made

    def _fill_nodes(self, record: Record, nodes: Sequence[PrefixNode]) -> None:
        """Nodes one behind another get each its part of a record of all of them."""
        for node in nodes[:-1]:
            own, record = record.split(node.end)
            self.fill(node, own)
        self.fill(nodes[-1], record)

    def pin(self, owner: CacheOwner, tokens: Sequence[int]) -> int:
        """Keep what is known of `tokens` while anything else can go; returns how many tokens that are."""
        nodes, known = self._forest.walk(owner, tokens)
        if nodes and known < nodes[-1].end:
            nodes[-1] = self._forest.split(nodes[-1], known)
        for node in nodes:
            self._forest.pin(node)
        return known

    def pinned_bytes(self) -> int:
        return self._forest.pinned_bytes

    def unpinned_bytes(self, owner: CacheOwner, tokens: Sequence[int]) -> int:
        """What pinning these tokens would add to that, at most."""
        nodes, _ = self._forest.walk(owner, tokens)
        return sum(node.record.nbytes for node in nodes if not node.pinned and node.record is not None)

    def shrink(self, most: int, enough: Callable[[], bool] = lambda: True) -> None:
        """Evict until no more than `most` bytes are held, and until it is `enough`: what running sequences hold as well
        is not evicted for that, as it would free nothing.

        What is looked at for that are those that go, a bounded number of others, and what running sequences hold."""
        if self.nbytes <= most and enough():
            return
        self._forest.sweep(SWEPT_NODES)
        spared: list[PrefixNode] = []
        try:
            self._shrink(most, enough, spared)
        finally:
            for node in spared:
                self._queue(node)

    def _shrink(self, most: int, enough: Callable[[], bool], spared: list[PrefixNode]) -> None:
        """Takes those that have to stay for now out of the queues, and adds them to `spared`."""
        weighed = refused = 0
        while self.nbytes > most or not enough():
            found = self._least(most, smaller=refused < MOST_REFUSALS)
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
            spared.append(victim)  # whatever fails; who does not stay is not queued again
            if victim.record is None or (self.nbytes <= most and not victim.record.idle_bytes):
                continue
            if self._compress_node(victim, queued.worth):
                continue
            if queue is self._compressible:
                refused += 1
            elif is_removable(victim):
                self._clock = max(self._clock, queued.worth)
                self._evict(victim)

    def _least(self, most: int, *, smaller: bool) -> tuple[EvictionQueue, QueuedNode] | None:
        """Which node is next, and whether it is to go or, if that may be, to be made `smaller`."""
        exceeding = self.shares.exceeding(most)
        queues = [self._compressible, self._evictable] if smaller else [self._evictable]
        found = [(*first, queue) for queue in queues if (first := queue.first(exceeding)) is not None]
        if not found:
            return None
        _, queued, queue = min(found, key=lambda each: each[0])
        return queue, queued

    def _queue(self, node: PrefixNode) -> None:
        """Have a node wait where it belongs, at what it is worth as far as is known now."""
        self._weigh(node)
        if is_removable(node):
            self._evictable.put(node, node.worth)
        else:
            self._evictable.remove(node)
        if self._compressor.may(node):
            assert node.record is not None
            back = min(self._compressor.seconds(node), self._cost(len(node.tokens)))
            freed = node.record.nbytes - self._compressor.least(node)
            self._compressible.put(node, min(node.worth, eviction_worth(node, back, freed)))
        else:
            self._compressible.remove(node)

    def _compress_node(self, node: PrefixNode, worth: float) -> bool:
        """Let go of what a node's record takes in pages, if that frees something. Whether it did."""
        if not self._compressor.may(node) or self._compressor.saves(node) <= 0:
            return False
        self._clock = max(self._clock, worth)
        self._forest.hold(node, self._compressor.compress_record(node))
        return True

    def clear(self, tenant: str) -> int:
        """Forget all of a tenant's; returns the bytes that this frees in memory."""
        return self._forest.clear(tenant)

    def free(self) -> None:
        """Let go of all records, whatever is wrong with the books. The last call."""
        self._forest.free()

    def nodes(self, owner: CacheOwner | None = None) -> Iterator[PrefixNode]:
        """An owner's, or all of them."""
        return self._forest.nodes(owner)

    def first(self, owner: CacheOwner) -> list[PrefixNode]:
        """The nodes that an owner's paths begin with."""
        return self._forest.first(owner)

    @property
    def changes(self) -> int:
        """Grows whenever what is kept does not stay the same."""
        return self._forest.changes

    @property
    def tenants(self) -> list[str]:
        return self._forest.tenants

    def outline(self, tenant: str, most: int) -> list[tuple[PrefixNode, int | None, int]]:
        """What was used most of a tenant's; see `outline_prefixes`."""
        return outline_prefixes(self._forest.roots(tenant), most)

    def owners(self, tenant: str) -> list[CacheOwner]:
        """As whom something of a tenant's is kept."""
        return self._forest.owners(tenant)

    def tallies(self, tenant: str) -> list[tuple[CacheOwner, MemoryTally]]:
        """How much of it is in memory, by owner. Looks at no record."""
        return self._forest.tallies(tenant)

    def check(self) -> None:
        self._forest.check()
        for queue, belongs in ((self._evictable, is_removable), (self._compressible, self._compressor.may)):
            queue.check()
            waiting = [node for node in self.nodes() if belongs(node)]
            assert len(queue) == len(waiting) and all(node in queue for node in waiting), "a queue is wrong"

    # Explaining

    def _reason(
        self, owner: CacheOwner, tokens: Sequence[int], limit: int, known: int, theirs: tuple[int, ...]
    ) -> MissReason:
        if known >= limit:
            return "complete"
        if self._evicted.holds(owner.words, tokens, known):
            return "evicted"
        if self._elsewhere(owner, tokens, lambda other: other.salt != owner.salt) - known >= OTHER_OWNER_TOKENS:
            return "salt"
        if self._elsewhere(owner, tokens, lambda other: other.lora != owner.lora) - known >= OTHER_OWNER_TOKENS:
            return "adapter"
        if theirs:
            return "diverged"
        return "new_turn" if known else "unseen"

    def _elsewhere(self, owner: CacheOwner, tokens: Sequence[int], differs: Callable[[CacheOwner], bool]) -> int:
        """How many of `tokens` are known of an owner of the same tenant's that differs so."""
        others = (each for each in self.owners(owner.tenant) if differs(each))
        return max(
            (self._forest.walk(other, tokens)[1] for other in itertools.islice(others, MOST_OTHER_OWNERS)), default=0
        )

    # Changing

    def _back(self, path: Sequence[PrefixNode], begin: int, end: int) -> int:
        """Where the windows of a record of [begin, end) begin: with it, if the path before it has what they see of
        earlier tokens. Else as far back as they go, as where a branch leaves in the middle of what was a record."""
        firsts = [(group, end - window + 1) for group, window in self._needs.windows]
        return begin if all(first >= begin or windows_see(path, group, first) for group, first in firsts) else 0

    def _refresh(self, node: PrefixNode, make: MakeRecord) -> Record | None:
        """All tokens are here. A node that cannot be resumed, as it lost its checkpoint or never had one, or lacks what
        windows see, gets that now."""
        path = node.path
        if node.record is None or can_resume_at_end(path, self._needs, "ram"):
            return None
        made = node.record.renewed(make(node.begin, self._back(path[:-1], node.begin, node.end)))
        self.fill(node, made)
        self._thin(node)
        return made

    def _thin(self, node: PrefixNode) -> None:
        for spare in list(superfluous_checkpoints(node)):
            self._give_up_checkpoint(spare)

    def _touch(self, node: PrefixNode) -> None:
        node.touched, node.turn = self._clock, next(self._turns)
        self._queue(node)

    def _weigh(self, node: PrefixNode) -> None:
        if node.record is not None:
            # As small as it can be: it is made smaller before it goes.
            node.worth = eviction_worth(node, self._cost(len(node.tokens)), self._compressor.least(node))

    def _evict(self, node: PrefixNode) -> None:
        """What nothing in memory goes on from leaves it; a node that something does gives up its checkpoint."""
        self.shares.evictions[node.tenant] += 1
        spilled = self._spill(node)
        if not node.is_last_in_memory:
            self._give_up_checkpoint(node)
            node.lost = not spilled
        elif spilled or node.is_on_disk:
            self._forest.hold(node, None)
        else:
            self._drop(node)

    def _give_up_checkpoint(self, node: PrefixNode) -> None:
        assert node.record is not None
        self._forest.hold(node, node.record.without_checkpoint())

    def _drop(self, node: PrefixNode) -> None:
        owner = node.root.owner
        assert owner is not None and node.parent is not None
        self._evicted.add(owner.words, node.parent.path_tokens, node.tokens)
        self._forest.hold(node, None)
        self._forest.prune(node)


def _records_of(path: Sequence[PrefixNode]) -> tuple[Record, ...]:
    return tuple(node.record for node in path if node.record is not None)


def _continuation(node: PrefixNode, known: int) -> tuple[int, ...]:
    """The first tokens that are kept behind the first `known` of a path that ends in or at the end of `node`."""
    rest = node.tokens[known - node.end + len(node.tokens) :] if known < node.end else ()
    while len(rest) < SNIPPET_TOKENS and node.children:
        node = max(node.children.values(), key=lambda child: child.worth)
        rest += node.tokens
    return rest[:SNIPPET_TOKENS]


MissReason = Literal["complete", "new_turn", "unseen", "diverged", "evicted", "checkpoint", "salt", "adapter"]


@dataclass(frozen=True, slots=True)
class ResumeNeeds:
    """What resuming needs, by the model's layers: a checkpoint, and the tokens that each window still sees."""

    checkpoint: bool = False
    windows: tuple[tuple[int, int], ...] = ()  # (group of layers, window)

    @property
    def anywhere(self) -> bool:
        """A sequence can be resumed after any of its tokens, not only at a node's end."""
        return not self.checkpoint and not self.windows


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """`known` tokens of the prompt are in the index; the first `length` can be taken over from `records`."""

    known: int = 0
    length: int = 0
    records: tuple[Record, ...] = ()

    @property
    def codec(self) -> str:
        return codec_of_records(self.records)


def codec_of_records(records: Iterable[Record]) -> str:
    """What states went through, or some of them."""
    return next((record.codec for record in records if record.codec != RAW), RAW)


@dataclass(frozen=True, slots=True)
class MatchExplanation:
    """Why a match is no longer. `theirs` are the first tokens of what is kept where the prompt's own differ.

    - complete: all that may be offered is
    - new_turn: nothing that goes on from there was kept
    - unseen: nothing that begins like the prompt was kept
    - diverged: what was kept goes on otherwise
    - evicted: it was kept, and had to go
    - checkpoint: more is known, but this model can be resumed only where messages and chunks end or prompts parted
    - salt: it is kept under another salt of the same tenant
    """

    known: int
    length: int
    reason: MissReason
    theirs: tuple[int, ...] = ()
    filed: int = 0  # tokens of the first `length` that would have to be read from disk
    codec: str = RAW  # what the rest went through


CacheTier = Literal["ram", "disk"]


@dataclass(frozen=True, slots=True)
class PrefixReach:
    """The first `resident` tokens of a prompt can be resumed from memory, the first `length` if what these nodes have
    on disk were there."""

    resident: int
    length: int
    lacking: tuple[PrefixNode, ...]


def node_holds(node: PrefixNode, tier: CacheTier) -> bool:
    return node.record is not None or (tier == "disk" and node.is_on_disk)


def nodes_within_tier(nodes: Sequence[PrefixNode], tier: CacheTier) -> list[PrefixNode]:
    """Those at the path's beginning that have something there."""
    found: list[PrefixNode] = []
    for node in nodes:
        if not node_holds(node, tier):
            break
        found.append(node)
    return found


def resumable_prefix(
    nodes: Sequence[PrefixNode], known: int, limit: int, needs: ResumeNeeds, tier: CacheTier
) -> tuple[int, int]:
    """(length, number of nodes) of the longest prefix from which computing can go on."""
    path = nodes_within_tier(nodes, tier)
    known = min(known, path[-1].end) if path else 0
    if needs.anywhere:
        length = min(known, limit)
        return length, sum(node.begin < length for node in path)
    for depth in range(len(path), 0, -1):
        end = path[depth - 1].end
        if end <= min(known, limit) and can_resume_at_end(path[:depth], needs, tier):
            return end, depth
    return 0, 0


def can_resume_at_end(path: Sequence[PrefixNode], needs: ResumeNeeds, tier: CacheTier) -> bool:
    if needs.checkpoint and not _node_has_checkpoint(path[-1], tier):
        return False
    return all(windows_see(path, group, path[-1].end - window + 1) for group, window in needs.windows)


def windows_see(path: Sequence[PrefixNode], group: int, place: int) -> bool:
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


def _node_has_checkpoint(node: PrefixNode, tier: CacheTier) -> bool:
    return node.has_checkpoint or (tier == "disk" and node.has_disk_checkpoint)
