"""The radix trees of the prefix index, one for each owner: walking along them, splitting nodes, and counting what is in
memory.

A node is a run of tokens and the record of them: in memory, on disk (`DiskRecord`), or both. Only `hold` changes what
is in memory, and only `recount` follows when pages became smaller. Pure Python.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from ingot.cache.disk.index import DiskEntry
from ingot.cache.disk.index import common_prefix_length as common_prefix_length
from ingot.cache.disk.record_file import PathHash, extend_path_hash, new_path_hash
from ingot.cache.records import Record
from ingot.shares import Shares


class CacheOwner(NamedTuple):
    """Whose tokens these are. Owners share nothing, and nothing about one tenant is revealed to another."""

    tenant: str = ""
    salt: str = ""
    exact: bool = False  # neither reuses nor stores anything that went through a lossy codec
    lora: str = ""  # the digest of the adapter that the KV was computed with

    @property
    def words(self) -> tuple[str, str, str, str]:
        return self.tenant, self.salt, "exact" if self.exact else "", self.lora


class MemoryTally(NamedTuple):
    """Totals over the nodes that are in memory."""

    records: int = 0
    tokens: int = 0
    checkpoints: int = 0
    pinned_tokens: int = 0
    bytes: int = 0
    pinned_bytes: int = 0

    def plus(self, other: MemoryTally, sign: int = 1) -> MemoryTally:
        return MemoryTally(*(mine + sign * theirs for mine, theirs in zip(self, other, strict=True)))


NO_MEMORY = MemoryTally()


@dataclass(eq=False, slots=True)
class PrefixNode:
    """Tokens up to `end` of its path, with a record of them in memory, on disk, or both. The parent of a node in memory
    is in memory too. Only a root has an owner; it has no tokens and no record."""

    parent: PrefixNode | None
    tokens: tuple[int, ...]
    record: Record | None
    end: int = 0
    children: dict[int, PrefixNode] = field(default_factory=dict)
    worth: float = 0.0
    touched: float = 0.0  # the eviction clock when it was last used
    turn: int = 0  # the number of that use, counted over all nodes
    uses: int = 0  # prompts that it was a part of
    resumed: int = 0  # sequences that resumed from its end
    landmark: bool = False  # its end is one that new conversations share, such as the system prompt's
    pinned: bool = False
    lost: bool = False  # its checkpoint was evicted
    owner: CacheOwner | None = None
    disk_record: DiskRecord | None = None
    hashed: PathHash | None = None  # of all tokens up to its end, computed on first use
    resident_children: int = 0  # children that have a record in memory
    tally: MemoryTally = NO_MEMORY  # of a root: the total over all nodes below it
    root: PrefixNode = field(init=False)

    def __post_init__(self) -> None:
        self.root = self if self.parent is None else self.parent.root

    @property
    def begin(self) -> int:
        return self.end - len(self.tokens)

    @property
    def root_owner(self) -> CacheOwner:
        owner = self.root.owner
        assert owner is not None
        return owner

    @property
    def tenant(self) -> str:
        return self.root_owner.tenant

    @property
    def path(self) -> list[PrefixNode]:
        """From the first node below the root to this one."""
        found: list[PrefixNode] = []
        node: PrefixNode | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def path_tokens(self) -> tuple[int, ...]:
        """All tokens up to its end."""
        return tuple(token for node in self.path for token in node.tokens)

    @property
    def path_hash(self) -> PathHash:
        """Of all tokens up to its end. No token is hashed twice."""
        unhashed: list[PrefixNode] = []
        node = self
        while node.hashed is None and node.parent is not None:
            unhashed.append(node)
            node = node.parent
        hashed = node.hashed or new_path_hash()
        for node in reversed(unhashed):
            hashed = node.hashed = extend_path_hash(hashed, node.tokens)
        return hashed

    @property
    def is_on_disk(self) -> bool:
        return self.disk_record is not None and self.disk_record.there

    @property
    def has_disk_checkpoint(self) -> bool:
        return self.disk_record is not None and self.disk_record.there and self.disk_record.has_checkpoint

    @property
    def is_saved(self) -> bool:
        """All that it has in memory is on disk too."""
        if self.disk_record is None or not self.disk_record.there:
            return False
        return self.record is None or self.disk_record.holds_all_of(self.record)

    @property
    def is_last_in_memory(self) -> bool:
        """No child of it is in memory."""
        return not self.resident_children

    @property
    def has_checkpoint(self) -> bool:
        return self.record is not None and self.record.has_checkpoint

    @property
    def own_tally(self) -> MemoryTally:
        if self.record is None:
            return NO_MEMORY
        tokens, nbytes, pinned = len(self.tokens), self.record.nbytes, int(self.pinned)
        return MemoryTally(1, tokens, int(self.record.has_checkpoint), tokens * pinned, nbytes, nbytes * pinned)


class PrefixForest:
    def __init__(self, shares: Shares, changed: Callable[[PrefixNode], None] = lambda node: None) -> None:
        """`changed` is called with each node whose record changes, that is pinned, or that becomes or ceases to be the
        last in memory on its path."""
        self._roots: dict[str, dict[CacheOwner, PrefixNode]] = {}  # by tenant
        self._changed = changed
        self._unswept: Iterator[PrefixNode] = iter(())
        self.shares = shares
        self._pinned_bytes = 0
        self.changes = 0

    # Finding

    def walk(self, owner: CacheOwner, tokens: Sequence[int]) -> tuple[list[PrefixNode], int]:
        """The nodes along `tokens`, of which the last may match only in part, and how many tokens match."""
        tokens = tuple(tokens)
        node, matched, found = self._root(owner), 0, []
        while node is not None and matched == node.end and matched < len(tokens):
            node = self._child(node, tokens[matched])
            if node is not None:
                found.append(node)
                matched += common_prefix_length(node.tokens, tokens[matched : matched + len(node.tokens)])
        return found, matched

    def _child(self, node: PrefixNode, token: int) -> PrefixNode | None:
        child = node.children.get(token)
        if child is not None and child.record is None and not child.is_on_disk:  # its file is gone
            self.prune(child)
            return None
        return child

    def nodes(self, owner: CacheOwner | None = None) -> Iterator[PrefixNode]:
        """An owner's, or all of them."""
        if owner is None:
            roots = [root for owned in self._roots.values() for root in owned.values()]
        else:
            roots = [root] if (root := self._root(owner)) is not None else []
        for root in roots:
            yield from _nodes_below(root)

    @property
    def tenants(self) -> list[str]:
        return list(self._roots)

    def owners(self, tenant: str) -> list[CacheOwner]:
        """A tenant's owners that have something cached."""
        return list(self._roots.get(tenant, {}))

    def tallies(self, tenant: str) -> list[tuple[CacheOwner, MemoryTally]]:
        """What each of a tenant's owners has in memory. Visits only their roots."""
        return [(owner, root.tally) for owner, root in self._roots.get(tenant, {}).items()]

    def first(self, owner: CacheOwner) -> list[PrefixNode]:
        """The nodes that an owner's paths begin with."""
        root = self._root(owner)
        return [] if root is None else list(root.children.values())

    def pinned_bytes(self) -> int:
        return self._pinned_bytes

    def roots(self, tenant: str) -> list[PrefixNode]:
        return list(self._roots.get(tenant, {}).values())

    def _root(self, owner: CacheOwner) -> PrefixNode | None:
        return self._roots.get(owner.tenant, {}).get(owner)

    # Changing

    def root(self, owner: CacheOwner) -> PrefixNode:
        """An owner's root, made on first use."""
        return self._roots.setdefault(owner.tenant, {}).setdefault(owner, PrefixNode(None, (), None, owner=owner))

    def hold(self, node: PrefixNode, record: Record | None) -> None:
        """Set, replace or remove a node's record in memory."""
        before, added = node.own_tally, (record is not None) - (node.record is not None)
        assert node.parent is not None
        node.record = record
        node.parent.resident_children += added
        self.changes += 1
        self._count(node, before)
        self._changed(node)
        if added and node.parent.record is not None:
            self._changed(node.parent)

    def pin_node(self, node: PrefixNode) -> None:
        before = node.own_tally
        node.pinned = True
        self._count(node, before)
        self._changed(node)

    def _count(self, node: PrefixNode, before: MemoryTally) -> None:
        """Update the totals for a node whose tally was `before`."""
        added = node.own_tally.plus(before, -1)
        node.root.tally = node.root.tally.plus(added)
        self._pinned_bytes += added.pinned_bytes
        self.shares.add(node.tenant, added.bytes)

    def recount(self) -> None:
        """Count all records again, since their pages became smaller."""
        for tenant, owned in self._roots.items():
            for root in owned.values():
                before, root.tally = root.tally, _tally_below(root)
                self._pinned_bytes += root.tally.pinned_bytes - before.pinned_bytes
                self.shares.add(tenant, root.tally.bytes - before.bytes)

    def split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cut a node in two where a new branch leaves it. Returns the upper half."""
        assert node.parent is not None
        cut, record = at - node.begin, node.record
        halves = None if record is None else record.split(at)
        self.hold(node, None)  # while its tokens change
        upper = PrefixNode(
            node.parent, node.tokens[:cut], None, at, worth=node.worth, uses=node.uses, pinned=node.pinned
        )
        upper.touched, upper.turn = node.touched, node.turn
        node.parent.children[node.tokens[0]] = upper
        node.parent, node.tokens = upper, node.tokens[cut:]
        upper.children[node.tokens[0]] = node
        if halves is not None:
            self.hold(upper, halves[0])
            self.hold(node, halves[1])
        if node.disk_record is not None:
            upper.disk_record, node.disk_record = node.disk_record.split(at)
        return upper

    def add_entry(self, parent: PrefixNode, entry: DiskEntry) -> None:
        """Add a record on disk that continues from a node's end."""
        self.changes += 1
        disk_record, node = DiskRecord.whole(entry), parent
        tokens = tuple(entry.tokens)
        while node.end < entry.end:
            done = node.end - entry.begin
            child = self._step(node, tokens[done:])
            if child is None:
                child = PrefixNode(node, tokens[done:], None, entry.end, landmark=entry.landmark)
                node.children[tokens[done]] = child
            node, part = child, disk_record.part(child.begin, child.end)
            if not (node.disk_record and node.disk_record.there and node.disk_record.holds_all_of(part)):
                node.disk_record = part

    def ending(self, start: PrefixNode, tokens: Sequence[int]) -> PrefixNode | None:
        """The node that ends where `tokens` do, which continue from the end of `start`; a longer one is split there.
        None where they are not in the tree."""
        tokens, node, end = tuple(tokens), start, start.end + len(tokens)
        while node.end < end:
            child = self._step(node, tokens[node.end - start.end :])
            if child is None:
                return None
            node = child
        return node

    def _step(self, node: PrefixNode, tokens: tuple[int, ...]) -> PrefixNode | None:
        """The child of a node along `tokens`, split where they end or differ."""
        child = self._child(node, tokens[0])
        if child is None:
            return None
        equal = common_prefix_length(child.tokens, tokens[: len(child.tokens)])
        return child if equal == len(child.tokens) else self.split(child, child.begin + equal)

    def prune(self, node: PrefixNode) -> None:
        """Remove a node and all below it, none of which is in memory."""
        self.changes += 1
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        if parent.owner is not None and not parent.children:
            owners = self._roots[parent.owner.tenant]
            del owners[parent.owner]
            if not owners:
                del self._roots[parent.owner.tenant]

    def sweep(self, most: int) -> None:
        """Check the next `most` nodes, and remove those whose files are gone. What is in memory stays."""
        for _ in range(most):
            node = next(self._unswept, None)
            if node is None:
                self._unswept = self.nodes()
                return
            if node.record is None and not node.is_on_disk and self._is_here(node):
                self.prune(node)

    def _is_here(self, node: PrefixNode) -> bool:
        """Whether it is still part of the tree: nodes above it may have been pruned meanwhile."""
        while node.parent is not None:
            if node.parent.children.get(node.tokens[0]) is not node:
                return False
            node = node.parent
        return self._root(node.root_owner) is node

    def clear(self, tenant: str) -> int:
        """Remove everything of a tenant. Returns the bytes that this frees in memory."""
        before = self.shares.total
        for owner in self.owners(tenant):
            for node in self.nodes(owner):
                # The nodes refer to each other. Their records would otherwise be freed by the garbage collector, in
                # whichever thread it runs, and pages belong to this thread.
                self.hold(node, None)
        self._roots.pop(tenant, None)
        return before - self.shares.total

    def free(self) -> None:
        """Release all records, even if the counts are wrong. Must be the last call."""
        for node in self.nodes():
            node.record = None  # see `clear`
        self._roots.clear()

    def check(self) -> None:
        for tenant, owned in self._roots.items():
            for root in owned.values():
                assert root.tally == _tally_below(root), "an owner's total is wrong"
                assert root.owner is not None and root.owner.tenant == tenant
        for node in self.nodes():
            assert node.parent is not None and node.root is node.parent.root
            assert node.tokens and node.begin == node.parent.end, "a node does not begin where its parent ends"
            assert node.parent.children[node.tokens[0]] is node, "a node is not its parent's child"
            assert node.record is not None or node.disk_record is not None, "a node has nothing"
            resident = sum(child.record is not None for child in node.children.values())
            assert node.resident_children == resident, "a node's children in memory are miscounted"
            for part in (node.record, node.disk_record):
                assert part is None or (part.begin, part.end) == (node.begin, node.end), "a record has other tokens"
            if node.record is not None:
                has_parent = node.parent.record is not None or node.parent.owner is not None
                assert has_parent, "a record is in memory, and its parent is not"
        roots = [(tenant, root.tally) for tenant, owned in self._roots.items() for root in owned.values()]
        nbytes: Counter[str] = Counter()
        for tenant, tally in roots:
            nbytes[tenant] += tally.bytes
        assert +nbytes == self.shares.held and nbytes.total() == self.shares.total, "bytes are miscounted"
        assert self._pinned_bytes == sum(tally.pinned_bytes for _, tally in roots), "pins are miscounted"


def _tally_below(root: PrefixNode) -> MemoryTally:
    """The total of all nodes below a root, counted again."""
    total = MemoryTally()
    for node in _nodes_below(root):
        total = total.plus(node.own_tally)
    return total


def _nodes_below(root: PrefixNode) -> Iterator[PrefixNode]:
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """Tokens [begin, end) of a record in a file."""

    entry: DiskEntry
    begin: int
    end: int

    @classmethod
    def whole(cls, entry: DiskEntry) -> DiskRecord:
        return cls(entry, entry.begin, entry.end)

    @property
    def there(self) -> bool:
        return not self.entry.lost

    @property
    def has_checkpoint(self) -> bool:
        return self.entry.checkpoint and self.end == self.entry.end

    def oldest(self, group: int) -> int:
        """The first token whose keys and values it has in a group; its end where it has none."""
        first = self.entry.oldest[group]
        if first < self.entry.begin:  # it reaches back so as to need no record before it, which serves only its end
            return first if self.end == self.entry.end else self.end
        return max(first, self.begin)

    def holds_all_of(self, record: Record | DiskRecord) -> bool:
        """Whether it has everything that another record of the same tokens has."""
        if record.has_checkpoint and not self.has_checkpoint:
            return False
        return all(self.oldest(group) <= record.oldest(group) for group in range(len(self.entry.oldest)))

    def part(self, begin: int, end: int) -> DiskRecord:
        return replace(self, begin=begin, end=end)

    def split(self, at: int) -> tuple[DiskRecord, DiskRecord]:
        return self.part(self.begin, at), self.part(at, self.end)


def outline_prefixes(roots: Iterable[PrefixNode], most: int) -> list[tuple[PrefixNode, int | None, int]]:
    """The `most` most used nodes, each behind its parent: the node, the parent's index in the list, and how many of its
    children are left out. Visits only the listed nodes and their children."""
    order = count()
    waiting: list[tuple[int, int, PrefixNode, int | None]] = []

    def offer(node: PrefixNode, parent: int | None) -> None:
        for child in node.children.values():
            heapq.heappush(waiting, (-child.uses, next(order), child, parent))

    for root in roots:
        offer(root, None)
    found: list[tuple[PrefixNode, int | None]] = []
    while waiting and len(found) < most:
        _, _, node, parent = heapq.heappop(waiting)
        found.append((node, parent))
        offer(node, len(found) - 1)
    listed = Counter(parent for _, parent in found)
    return [(node, parent, len(node.children) - listed[index]) for index, (node, parent) in enumerate(found)]
