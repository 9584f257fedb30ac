"""The radix index: which prefixes of which sequences are computed already, and where each can be resumed.

A tree of tokens for each owner. A node covers tokens [begin, end) of its path and has a record of them, in memory, on
disk, or both. The contract:

- `match` finds how far a prompt is known and the furthest point from which it can be resumed: the longest one where
  every kind of layer has what it needs in memory. It changes nothing but how recently the nodes were used.
- `peek` finds the same without a trace; `explain` also says why it went no further.
- `plant` adds what is on disk; `reach` finds what of that a prompt could use, and `fill` brings it back.
- `insert` adds what a sequence computed beyond what is known; what is known already is not stored twice.
- `pin` keeps a prefix for as long as anything else can go instead.
- `shrink` evicts until the index holds no more than so many bytes, of tenants that hold more than their share: least
  worth first, where worth is the time it takes to compute again per byte, times how often it was used, and is
  forgotten with age. Pinned nodes go last. What `spill` gets to disk first stays, as what it is there. With a codec,
  a record may be made smaller instead, and is back as soon as it is decoded: that time is what its pages are worth.
- `check` raises if the books are wrong.

Pure Python: it asks of a record only its bytes, its split, and what its layers hold.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ingot.cache.condenser import Condenser, NoCondenser
from ingot.cache.disk.entry import Entry
from ingot.cache.evicted import Evicted
from ingot.cache.matches import Explanation, Match, Needs, Reason, codec_of
from ingot.cache.outline import outline
from ingot.cache.prefix_eviction import EvictionQueue, Queued, removable, worth_of
from ingot.cache.prefix_tree import Forest
from ingot.cache.records import Record
from ingot.cache.resuming import Reach, Tier, is_complete, resumable, sees, within
from ingot.cache.thinning import superfluous
from ingot.cache.tree import Node, Owner, Tally
from ingot.shares import Shares

TELLING = 16
"""Tokens that must be known under another salt before that is given as the reason."""
BEHIND = 64
"""Tokens that a model must resume behind what is known before that is."""
SNIPPET = 12
"""Tokens of another continuation that an explanation shows."""
SALTS = 64
"""Other salts of a tenant that an explanation looks at."""
SWEPT = 32
"""Nodes that are looked at for lost files whenever room is made."""
WEIGHED = 64
"""Nodes at most that are weighed anew whenever room is made. Costs are learned: what was weighed with others counts as
that once so many were."""
REFUSED = 64
"""Nodes that cannot be made smaller now before no further ones are tried."""

NO_CONDENSER = NoCondenser()
Making = Callable[[int, int], Record]
Spill = Callable[[Node], bool]
"""Sees to it that a node's record is on disk, and gives the node its file. False where that cannot be now."""


class PrefixIndex:
    def __init__(
        self,
        needs: Needs,
        cost: Callable[[int], float],
        clock: Callable[[], float] = time.monotonic,
        spill: Spill = lambda node: False,
        condenser: Condenser = NO_CONDENSER,
    ) -> None:
        """`cost(n)` is the time in seconds that computing n tokens takes."""
        self._needs, self._cost, self._spill, self._condenser = needs, cost, spill, condenser
        self._evicted = Evicted()
        self._clock, self._turns = 0.0, itertools.count()
        self.shares = Shares("prefix cache", clock=clock)
        self._forest = Forest(self.shares, self._queue)
        self._evictable = EvictionQueue()  # by what computing them again takes,
        self._condensable = EvictionQueue()  # and by what decoding them does

    @property
    def nbytes(self) -> int:
        return self.shares.total

    def recount(self) -> None:
        """Pages that records hold take less than before."""
        self._forest.recount()

    def match(self, owner: Owner, tokens: Sequence[int], limit: int) -> Match:
        """What of `tokens` is here. At most the first `limit` are offered, so that something is left to compute."""
        self.shares.come(owner.tenant)
        nodes, known = self._forest.walk(owner, tokens)
        for node in nodes:
            node.uses += 1
            self._touch(node)
        length, depth = resumable(nodes, known, limit, self._needs, "ram")
        if depth and nodes[depth - 1].end == length:
            nodes[depth - 1].resumed += 1
        return Match(known, length, _records(nodes[:depth]))

    def peek(self, owner: Owner, tokens: Sequence[int], limit: int) -> Match:
        """What `match` would find now; changes nothing."""
        nodes, known = self._forest.walk(owner, tokens)
        length, depth = resumable(nodes, known, limit, self._needs, "ram")
        return Match(known, length, _records(nodes[:depth]))

    def records(self, owner: Owner, tokens: Sequence[int]) -> list[Record]:
        """What is in memory of `tokens`, whether it can be resumed or not."""
        return list(_records(self.along(owner, tokens)))

    def along(self, owner: Owner, tokens: Sequence[int]) -> list[Node]:
        """The nodes that `tokens` pass through, the last one perhaps only in part."""
        return self._forest.walk(owner, tokens)[0]

    def resident(self, owner: Owner, tokens: Sequence[int]) -> int:
        """How many of `tokens` are in memory, whether they can be resumed there or not."""
        nodes, known = self._forest.walk(owner, tokens)
        path = within(nodes, "ram")
        return min(known, path[-1].end) if path else 0

    def explain(self, owner: Owner, tokens: Sequence[int], limit: int, tier: Tier = "ram") -> Explanation:
        """What `match` would find now, and why no more; or what it would with all that is on disk in memory."""
        nodes, known = self._forest.walk(owner, tokens)
        length, depth = resumable(nodes, known, limit, self._needs, tier)
        theirs = _continuation(nodes[-1], known) if nodes and known < len(tokens) else ()
        filed = sum(min(node.end, length) - node.begin for node in nodes[:depth] if node.record is None)
        codec = codec_of(_records(nodes[:depth]))
        if min(known, limit) - length >= BEHIND:
            lost = any(node.lost or node.record is None for node in nodes[depth:] if node.end <= known)
            return Explanation(known, length, "evicted" if lost else "checkpoint", theirs, filed, codec)
        return Explanation(known, length, self._reason(owner, tokens, limit, known, theirs), theirs, filed, codec)

    # What is on disk

    def plant(self, owner: Owner, tokens: Sequence[int], entry: Entry) -> bool:
        """Know of a record on disk, of the last of `tokens`. False where nobody knows what it goes on from."""
        before = tuple(tokens[: entry.begin])
        if self._forest.walk(owner, before)[1] < entry.begin:
            return False
        behind = self._forest.ending(self._forest.planted(owner), before)
        assert behind is not None, "what was just found is gone"
        self._forest.plant(behind, entry)
        return True

    def plant_along(self, owner: Owner, found: Iterable[tuple[Entry, Entry | None]]) -> None:
        """Know of records on disk, each with the one that it goes on from the end of, or from amid it, which comes
        before; None where it begins a path. Each is looked at once, however long its path is."""
        behind: dict[Entry, Node] = {}
        for entry, after in found:
            start = self._forest.planted(owner) if after is None else behind.get(after)
            gap = () if after is None else after.tokens[: entry.begin - after.begin]
            place = None if start is None else self._forest.ending(start, gap)
            if place is not None and place.end == entry.begin:
                behind[entry] = place
                self._forest.plant(place, entry)

    def reach(self, owner: Owner, tokens: Sequence[int], limit: int) -> Reach:
        """What reading from disk would add to a match."""
        nodes, known = self._forest.walk(owner, tokens)
        resident, _ = resumable(nodes, known, limit, self._needs, "ram")
        length, depth = resumable(nodes, known, limit, self._needs, "disk")
        path = nodes[:depth]
        for node in path:
            self._touch(node)  # what is in memory of it is to stay until the rest is
        lacking = [node for node in path if node.record is None]
        if path and self._needs.checkpoint and path[-1].record is not None and not path[-1].has_checkpoint:
            lacking.append(path[-1])
        return Reach(resident, length, tuple(lacking))

    def fill(self, node: Node, record: Record) -> None:
        """Have in memory what was computed or read from disk, or more of it than before."""
        self._forest.hold(node, record)
        node.lost = False
        self._touch(node)

    # Keeping

    def insert(
        self, owner: Owner, tokens: Sequence[int], end: int, make: Making, *, landmark: bool = False
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
        made = make(begin, self._back(within(nodes, "ram"), begin, end))
        if known < end:
            parent = nodes[-1] if nodes else self._forest.planted(owner)
            absent.append(Node(parent, tokens[known:end], None, end))
            parent.children[tokens[known]] = absent[-1]
        self._share_out(made, absent)
        absent[-1].landmark |= landmark
        self._thin(absent[-1])
        return made

    def _share_out(self, record: Record, nodes: Sequence[Node]) -> None:
        """Nodes one behind another get each its part of a record of all of them."""
        for node in nodes[:-1]:
            own, record = record.split(node.end)
            self.fill(node, own)
        self.fill(nodes[-1], record)

    def pin(self, owner: Owner, tokens: Sequence[int]) -> int:
        """Keep what is known of `tokens` while anything else can go; returns how many tokens that are."""
        nodes, known = self._forest.walk(owner, tokens)
        if nodes and known < nodes[-1].end:
            nodes[-1] = self._forest.split(nodes[-1], known)
        for node in nodes:
            self._forest.pin(node)
        return known

    def pinned_bytes(self) -> int:
        return self._forest.pinned_bytes

    def unpinned_bytes(self, owner: Owner, tokens: Sequence[int]) -> int:
        """What pinning these tokens would add to that, at most."""
        nodes, _ = self._forest.walk(owner, tokens)
        return sum(node.record.nbytes for node in nodes if not node.pinned and node.record is not None)

    def shrink(self, most: int, enough: Callable[[], bool] = lambda: True) -> None:
        """Evict until no more than `most` bytes are held, and until it is `enough`: what running sequences hold as well
        is not evicted for that, as it would free nothing.

        What is looked at for that are those that go, a bounded number of others, and what running sequences hold."""
        if self.nbytes <= most and enough():
            return
        self._forest.sweep(SWEPT)
        spared: list[Node] = []
        try:
            self._shrink(most, enough, spared)
        finally:
            for node in spared:
                self._queue(node)

    def _shrink(self, most: int, enough: Callable[[], bool], spared: list[Node]) -> None:
        """Takes those that have to stay for now out of the queues, and adds them to `spared`."""
        weighed = refused = 0
        while self.nbytes > most or not enough():
            found = self._least(most, smaller=refused < REFUSED)
            if found is None:
                return
            queue, queued = found
            victim = queued.node
            if weighed < WEIGHED:
                weighed += 1
                self._queue(victim)
                if queue.worth(victim) > queued.worth:
                    continue
            queue.remove(victim)
            spared.append(victim)  # whatever fails; who does not stay is not queued again
            if victim.record is None or (self.nbytes <= most and not victim.record.idle_bytes):
                continue
            if self._condense(victim, queued.worth):
                continue
            if queue is self._condensable:
                refused += 1
            elif removable(victim):
                self._clock = max(self._clock, queued.worth)
                self._evict(victim)

    def _least(self, most: int, *, smaller: bool) -> tuple[EvictionQueue, Queued] | None:
        """Which node is next, and whether it is to go or, if that may be, to be made `smaller`."""
        exceeding = self.shares.exceeding(most)
        queues = [self._condensable, self._evictable] if smaller else [self._evictable]
        found = [(*first, queue) for queue in queues if (first := queue.first(exceeding)) is not None]
        if not found:
            return None
        _, queued, queue = min(found, key=lambda each: each[0])
        return queue, queued

    def _queue(self, node: Node) -> None:
        """Have a node wait where it belongs, at what it is worth as far as is known now."""
        self._weigh(node)
        if removable(node):
            self._evictable.put(node, node.worth)
        else:
            self._evictable.remove(node)
        if self._condenser.may(node):
            assert node.record is not None
            back = min(self._condenser.seconds(node), self._cost(len(node.tokens)))
            freed = node.record.nbytes - self._condenser.least(node)
            self._condensable.put(node, min(node.worth, worth_of(node, back, freed)))
        else:
            self._condensable.remove(node)

    def _condense(self, node: Node, worth: float) -> bool:
        """Let go of what a node's record takes in pages, if that frees something. Whether it did."""
        if not self._condenser.may(node) or self._condenser.saves(node) <= 0:
            return False
        self._clock = max(self._clock, worth)
        self._forest.hold(node, self._condenser.condensed(node))
        return True

    def clear(self, tenant: str) -> int:
        """Forget all of a tenant's; returns the bytes that this frees in memory."""
        return self._forest.clear(tenant)

    def free(self) -> None:
        """Let go of all records, whatever is wrong with the books. The last call."""
        self._forest.free()

    def nodes(self, owner: Owner | None = None) -> Iterator[Node]:
        """An owner's, or all of them."""
        return self._forest.nodes(owner)

    def first(self, owner: Owner) -> list[Node]:
        """The nodes that an owner's paths begin with."""
        return self._forest.first(owner)

    @property
    def changes(self) -> int:
        """Grows whenever what is kept does not stay the same."""
        return self._forest.changes

    @property
    def tenants(self) -> list[str]:
        return self._forest.tenants

    def outline(self, tenant: str, most: int) -> list[tuple[Node, int | None, int]]:
        """What was used most of a tenant's; see `outline`."""
        return outline(self._forest.roots(tenant), most)

    def owners(self, tenant: str) -> list[Owner]:
        """As whom something of a tenant's is kept."""
        return self._forest.owners(tenant)

    def tallies(self, tenant: str) -> list[tuple[Owner, Tally]]:
        """How much of it is in memory, by owner. Looks at no record."""
        return self._forest.tallies(tenant)

    def check(self) -> None:
        self._forest.check()
        for queue, belongs in ((self._evictable, removable), (self._condensable, self._condenser.may)):
            queue.check()
            waiting = [node for node in self.nodes() if belongs(node)]
            assert len(queue) == len(waiting) and all(node in queue for node in waiting), "a queue is wrong"

    # Explaining

    def _reason(self, owner: Owner, tokens: Sequence[int], limit: int, known: int, theirs: tuple[int, ...]) -> Reason:
        if known >= limit:
            return "complete"
        if self._evicted.holds(owner.words, tokens, known):
            return "evicted"
        if self._elsewhere(owner, tokens, lambda other: other.salt != owner.salt) - known >= TELLING:
            return "salt"
        if self._elsewhere(owner, tokens, lambda other: other.lora != owner.lora) - known >= TELLING:
            return "adapter"
        if theirs:
            return "diverged"
        return "new_turn" if known else "unseen"

    def _elsewhere(self, owner: Owner, tokens: Sequence[int], differs: Callable[[Owner], bool]) -> int:
        """How many of `tokens` are known of an owner of the same tenant's that differs so."""
        others = (each for each in self.owners(owner.tenant) if differs(each))
        return max((self._forest.walk(other, tokens)[1] for other in itertools.islice(others, SALTS)), default=0)

    # Changing

    def _back(self, path: Sequence[Node], begin: int, end: int) -> int:
        """Where the windows of a record of [begin, end) begin: with it, if the path before it has what they see of
        earlier tokens. Else as far back as they go, as where a branch leaves in the middle of what was a record."""
        firsts = [(group, end - window + 1) for group, window in self._needs.windows]
        return begin if all(first >= begin or sees(path, group, first) for group, first in firsts) else 0

    def _refresh(self, node: Node, make: Making) -> Record | None:
        """All tokens are here. A node that cannot be resumed, as it lost its checkpoint or never had one, or lacks what
        windows see, gets that now."""
        path = node.path
        if node.record is None or is_complete(path, self._needs, "ram"):
            return None
        made = node.record.renewed(make(node.begin, self._back(path[:-1], node.begin, node.end)))
        self.fill(node, made)
        self._thin(node)
        return made

    def _thin(self, node: Node) -> None:
        for spare in list(superfluous(node)):
            self._give_up_checkpoint(spare)

    def _touch(self, node: Node) -> None:
        node.touched, node.turn = self._clock, next(self._turns)
        self._queue(node)

    def _weigh(self, node: Node) -> None:
        if node.record is not None:
            # As small as it can be: it is made smaller before it goes.
            node.worth = worth_of(node, self._cost(len(node.tokens)), self._condenser.least(node))

    def _evict(self, node: Node) -> None:
        """What nothing in memory goes on from leaves it; a node that something does gives up its checkpoint."""
        self.shares.evictions[node.tenant] += 1
        spilled = self._spill(node)
        if not node.is_last_in_memory:
            self._give_up_checkpoint(node)
            node.lost = not spilled
        elif spilled or node.is_filed:
            self._forest.hold(node, None)
        else:
            self._drop(node)

    def _give_up_checkpoint(self, node: Node) -> None:
        assert node.record is not None
        self._forest.hold(node, node.record.without_checkpoint())

    def _drop(self, node: Node) -> None:
        owner = node.root.owner
        assert owner is not None and node.parent is not None
        self._evicted.add(owner.words, node.parent.path_tokens, node.tokens)
        self._forest.hold(node, None)
        self._forest.prune(node)


def _records(path: Sequence[Node]) -> tuple[Record, ...]:
    return tuple(node.record for node in path if node.record is not None)


def _continuation(node: Node, known: int) -> tuple[int, ...]:
    """The first tokens that are kept behind the first `known` of a path that ends in or at the end of `node`."""
    rest = node.tokens[known - node.end + len(node.tokens) :] if known < node.end else ()
    while len(rest) < SNIPPET and node.children:
        node = max(node.children.values(), key=lambda child: child.worth)
        rest += node.tokens
    return rest[:SNIPPET]
