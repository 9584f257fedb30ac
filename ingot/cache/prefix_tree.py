"""The trees of the index, one for each owner: finding a way in them, cutting nodes, and counting what is in memory.

Pure Python. Whose bytes are in memory is changed by `hold`, and by `recount` where pages became smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ingot.cache.disk.entry import Entry
from ingot.cache.filed import FiledRecord
from ingot.cache.records import Record
from ingot.cache.tree import Node, Owner, Tally, agreement
from ingot.shares import Shares


class Forest:
    def __init__(self, shares: Shares, changed: Callable[[Node], None] = lambda node: None) -> None:
        """`changed` is told of each node that has another record than before, is pinned, or is the last in memory on
        its path where it was not, or the other way round."""
        self._roots: dict[str, dict[Owner, Node]] = {}  # by tenant
        self._changed = changed
        self._unswept: Iterator[Node] = iter(())
        self.shares = shares
        self.pinned_bytes = 0
        self.changes = 0

    # Finding

    def walk(self, owner: Owner, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """The nodes along `tokens`, the last one perhaps only in part, and how many tokens agree."""
        tokens = tuple(tokens)
        node, known, found = self._root(owner), 0, []
        while node is not None and known == node.end and known < len(tokens):
            node = self._child(node, tokens[known])
            if node is not None:
                found.append(node)
                known += agreement(node.tokens, tokens[known : known + len(node.tokens)])
        return found, known

    def _child(self, node: Node, token: int) -> Node | None:
        child = node.children.get(token)
        if child is not None and child.record is None and not child.is_filed:  # its file is gone
            self.prune(child)
            return None
        return child

    def nodes(self, owner: Owner | None = None) -> Iterator[Node]:
        """An owner's, or all of them."""
        if owner is not None:
            root = self._root(owner)
            roots = [] if root is None else [root]
        else:
            roots = [root for owned in self._roots.values() for root in owned.values()]
        for root in roots:
            yield from _below(root)

    @property
    def tenants(self) -> list[str]:
        return list(self._roots)

    def owners(self, tenant: str) -> list[Owner]:
        """As whom something of a tenant's is kept."""
        return list(self._roots.get(tenant, {}))

    def tallies(self, tenant: str) -> list[tuple[Owner, Tally]]:
        """What is in memory of each of a tenant's owners. Looks at no node but their roots."""
        return [(owner, root.tally) for owner, root in self._roots.get(tenant, {}).items()]

    def first(self, owner: Owner) -> list[Node]:
        """The nodes that an owner's paths begin with."""
        root = self._root(owner)
        return [] if root is None else list(root.children.values())

    def roots(self, tenant: str) -> list[Node]:
        return list(self._roots.get(tenant, {}).values())

    def _root(self, owner: Owner) -> Node | None:
        return self._roots.get(owner.tenant, {}).get(owner)

    # Changing

    def planted(self, owner: Owner) -> Node:
        """An owner's root."""
        return self._roots.setdefault(owner.tenant, {}).setdefault(owner, Node(None, (), None, owner=owner))

    def hold(self, node: Node, record: Record | None) -> None:
        """Have a record in memory, another one than before, or none any more."""
        before, came = node.own_tally, (record is not None) - (node.record is not None)
        assert node.parent is not None
        node.record = record
        node.parent.resident_children += came
        self.changes += 1
        self._count(node, before)
        self._changed(node)
        if came and node.parent.record is not None:
            self._changed(node.parent)

    def pin(self, node: Node) -> None:
        before = node.own_tally
        node.pinned = True
        self._count(node, before)
        self._changed(node)

    def _count(self, node: Node, before: Tally) -> None:
        """A node holds something else than `before`."""
        added = node.own_tally.plus(before, -1)
        node.root.tally = node.root.tally.plus(added)
        self.pinned_bytes += added.pinned_bytes
        self.shares.add(node.tenant, added.bytes)

    def recount(self) -> None:
        """Pages take less than before, whosever records hold them."""
        for tenant, owned in self._roots.items():
            for root in owned.values():
                before, root.tally = root.tally, _counted(root)
                self.pinned_bytes += root.tally.pinned_bytes - before.pinned_bytes
                self.shares.add(tenant, root.tally.bytes - before.bytes)

    def split(self, node: Node, at: int) -> Node:
        """Cut a node in two where a new branch leaves it; returns the upper half."""
        assert node.parent is not None
        cut, record = at - node.begin, node.record
        halves = None if record is None else record.split(at)
        self.hold(node, None)  # until it is of other tokens
        upper = Node(node.parent, node.tokens[:cut], None, at, worth=node.worth, uses=node.uses, pinned=node.pinned)
        upper.touched, upper.turn = node.touched, node.turn
        node.parent.children[node.tokens[0]] = upper
        node.parent, node.tokens = upper, node.tokens[cut:]
        upper.children[node.tokens[0]] = node
        if halves is not None:
            self.hold(upper, halves[0])
            self.hold(node, halves[1])
        if node.filed is not None:
            upper.filed, node.filed = node.filed.split(at)
        return upper

    def plant(self, behind: Node, entry: Entry) -> None:
        """Know of a record on disk that goes on from a node's end."""
        self.changes += 1
        filed, node = FiledRecord.whole(entry), behind
        tokens = tuple(entry.tokens)
        while node.end < entry.end:
            known = node.end - entry.begin
            child = self._step(node, tokens[known:])
            if child is None:
                child = Node(node, tokens[known:], None, entry.end, landmark=entry.landmark)
                node.children[tokens[known]] = child
            node, part = child, filed.part(child.begin, child.end)
            if not (node.filed and node.filed.there and node.filed.holds_all_of(part)):
                node.filed = part

    def ending(self, behind: Node, tokens: Sequence[int]) -> Node | None:
        """The node that ends where `tokens`, which go on from another's end, do: cut where it goes on. None where that
        is not known."""
        tokens, node, end = tuple(tokens), behind, behind.end + len(tokens)
        while node.end < end:
            child = self._step(node, tokens[node.end - behind.end :])
            if child is None:
                return None
            node = child
        return node

    def _step(self, node: Node, tokens: tuple[int, ...]) -> Node | None:
        """The node behind another one that `tokens` go through, or a part of it: cut where they end or part from it."""
        child = self._child(node, tokens[0])
        if child is None:
            return None
        agreed = agreement(child.tokens, tokens[: len(child.tokens)])
        return child if agreed == len(child.tokens) else self.split(child, child.begin + agreed)

    def prune(self, node: Node) -> None:
        """Forget a node, and what goes on from it, none of which is in memory."""
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
        """Look at the next so many nodes, and forget those whose files are gone; what is in memory stays."""
        for _ in range(most):
            node = next(self._unswept, None)
            if node is None:
                self._unswept = self.nodes()
                return
            if node.record is None and not node.is_filed and self._is_here(node):
                self.prune(node)

    def _is_here(self, node: Node) -> bool:
        """Whether it can still be found, as others may have been forgotten meanwhile, and what goes on from them."""
        while node.parent is not None:
            if node.parent.children.get(node.tokens[0]) is not node:
                return False
            node = node.parent
        return self._root(node.root_owner) is node

    def clear(self, tenant: str) -> int:
        """Forget all of a tenant's; returns the bytes that this frees in memory."""
        held = self.shares.total
        for owner in self.owners(tenant):
            for node in self.nodes(owner):
                # A tree refers to itself: what its nodes hold would wait for the garbage collector, which may run in
                # any thread, and pages are this one's.
                self.hold(node, None)
        self._roots.pop(tenant, None)
        return held - self.shares.total

    def free(self) -> None:
        """Let go of all records, whatever is wrong with the counts. The last call."""
        for node in self.nodes():
            node.record = None  # see `clear`
        self._roots.clear()

    def check(self) -> None:
        for tenant, owned in self._roots.items():
            for root in owned.values():
                assert root.tally == _counted(root), "the index has lost count of what an owner has"
                assert root.owner is not None and root.owner.tenant == tenant
        for node in self.nodes():
            assert node.parent is not None and node.root is node.parent.root
            assert node.tokens and node.begin == node.parent.end, "a node does not begin where its parent ends"
            assert node.parent.children[node.tokens[0]] is node, "a node is not its parent's child"
            assert node.record is not None or node.filed is not None, "a node has nothing"
            resident = sum(child.record is not None for child in node.children.values())
            assert node.resident_children == resident, "a node has lost count of what goes on from it"
            for part in (node.record, node.filed):
                assert part is None or (part.begin, part.end) == (node.begin, node.end), "a record is of other tokens"
            if node.record is not None:
                begun = node.parent.record is not None or node.parent.owner is not None
                assert begun, "a record in memory goes on from nothing there"
        roots = [(tenant, root.tally) for tenant, owned in self._roots.items() for root in owned.values()]
        held: Counter[str] = Counter()
        for tenant, tally in roots:
            held[tenant] += tally.bytes
        assert +held == self.shares.held and held.total() == self.shares.total, "the index has lost count of its bytes"
        assert self.pinned_bytes == sum(tally.pinned_bytes for _, tally in roots), "pins are miscounted"


def _counted(root: Node) -> Tally:
    """What is in memory below a root, looked at anew."""
    total = Tally()
    for node in _below(root):
        total = total.plus(node.own_tally)
    return total


def _below(root: Node) -> Iterator[Node]:
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node
