"""The trees of the index, one for each owner: finding a way in them, cutting nodes, and counting what is in memory.

Pure Python. Whose bytes are in memory is changed by `hold`, and by `recount` where pages became smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ingot.cache.disk.entry import Entry
from ingot.cache.filed import FiledRecord
from ingot.cache.records import Record
from ingot.cache.shares import Shares
from ingot.cache.tree import Node, Owner, agreement


class Forest:
    def __init__(self, shares: Shares) -> None:
        self._roots: dict[str, dict[Owner, Node]] = {}  # by tenant
        self.shares = shares
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
        before, after = (0 if each is None else each.nbytes for each in (node.record, record))
        node.record = record
        self.changes += 1
        self.shares.add(node.tenant, after - before)

    def recount(self) -> None:
        """Pages take less than before, whosever records hold them."""
        held: Counter[str] = Counter()
        for node in self.nodes():
            held[node.tenant] += 0 if node.record is None else node.record.nbytes
        for tenant in {*held, *self.shares.held}:
            self.shares.add(tenant, held[tenant] - self.shares.held[tenant])

    def split(self, node: Node, at: int) -> Node:
        """Cut a node in two where a new branch leaves it; returns the upper half."""
        assert node.parent is not None
        cut = at - node.begin
        upper = Node(node.parent, node.tokens[:cut], None, at, worth=node.worth, uses=node.uses, pinned=node.pinned)
        upper.touched, upper.turn = node.touched, node.turn
        node.parent.children[node.tokens[0]] = upper
        node.parent, node.tokens = upper, node.tokens[cut:]
        upper.children[node.tokens[0]] = node
        if node.record is not None:
            first, second = node.record.split(at)
            self.hold(upper, first)
            self.hold(node, second)
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

    def sweep(self) -> None:
        """Forget the nodes whose files are gone; what is in memory stays."""
        for node in [node for node in self.nodes() if node.record is None and not node.is_filed]:
            self.prune(node)

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

    def check(self) -> None:
        held: Counter[str] = Counter()
        for node in self.nodes():
            assert node.parent is not None
            assert node.tokens and node.begin == node.parent.end, "a node does not begin where its parent ends"
            assert node.parent.children[node.tokens[0]] is node, "a node is not its parent's child"
            assert node.record is not None or node.filed is not None, "a node has nothing"
            for part in (node.record, node.filed):
                assert part is None or (part.begin, part.end) == (node.begin, node.end), "a record is of other tokens"
            if node.record is not None:
                held[node.tenant] += node.record.nbytes
                begun = node.parent.record is not None or node.parent.owner is not None
                assert begun, "a record in memory goes on from nothing there"
        assert held == self.shares.held and held.total() == self.shares.total, "the index has lost count of its bytes"


def _below(root: Node) -> Iterator[Node]:
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node
