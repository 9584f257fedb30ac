"""The radix index: which prefixes of which sequences are computed already, and where each can be resumed.

A tree of tokens for each owner. A node covers tokens [begin, end) of its path and owns a record of them. The contract:

- `match` finds how far a prompt is known and the furthest point from which it can be resumed: the longest one where
  every kind of layer has what it needs. It changes nothing but how recently the nodes were used.
- `peek` finds the same without a trace; `explain` also says why it went no further.
- `insert` adds what a sequence computed beyond what is known; what is known already is not stored twice.
- `pin` keeps a prefix for as long as anything else can go instead.
- `shrink` evicts until the index holds no more than so many bytes, of tenants that hold more than their share: least
  worth first, where worth is the time it takes to compute again per byte, times how often it was used, and is
  forgotten with age. Pinned nodes go last.
- `check` raises if the books are wrong.

Pure Python: it asks of a record only its bytes, its split, and what its layers hold.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ingot.cache.evicted import Evicted
from ingot.cache.eviction import EvictionQueue, removable
from ingot.cache.matches import Explanation, Match, Needs, Reason
from ingot.cache.records import Record
from ingot.cache.shares import Shares
from ingot.cache.thinning import superfluous
from ingot.cache.tree import Node, Owner, agreement

__all__ = ["Explanation", "Match", "Needs", "Owner", "PrefixIndex", "agreement"]

TELLING = 16
"""Tokens that must be known under another salt before that is given as the reason."""
BEHIND = 64
"""Tokens that a model must resume behind what is known before that is."""
MOST_USES = 16
"""Uses beyond which a node is worth no more: what many share stays long, and is forgotten in the end."""
SNIPPET = 12
"""Tokens of another continuation that an explanation shows."""
SALTS = 64
"""Other salts of a tenant that an explanation looks at."""

Making = Callable[[int, int], Record]


class PrefixIndex:
    def __init__(self, needs: Needs, cost: Callable[[int], float], clock: Callable[[], float] = time.monotonic) -> None:
        """`cost(n)` is the time in seconds that computing n tokens takes."""
        self._needs, self._cost = needs, cost
        self._roots: dict[str, dict[str, Node]] = {}  # by tenant and salt
        self._evicted = Evicted()
        self._clock = 0.0
        self.shares = Shares(clock)

    @property
    def nbytes(self) -> int:
        return self.shares.total

    def match(self, owner: Owner, tokens: Sequence[int], limit: int) -> Match:
        """What of `tokens` is here. At most the first `limit` are offered, so that something is left to compute."""
        self.shares.come(owner.tenant)
        nodes, known = self._walk(owner, tokens)
        for node in nodes:
            node.uses += 1
            self._touch(node)
        length, depth = self._resumable(nodes, known, limit)
        if depth and nodes[depth - 1].end == length:
            nodes[depth - 1].resumed += 1
        records = tuple(node.record for node in nodes[:depth] if node.record is not None)
        return Match(known, length, records)

    def peek(self, owner: Owner, tokens: Sequence[int], limit: int) -> Match:
        """What `match` would find now; changes nothing."""
        nodes, known = self._walk(owner, tokens)
        length, depth = self._resumable(nodes, known, limit)
        return Match(known, length, tuple(node.record for node in nodes[:depth] if node.record is not None))

    def records(self, owner: Owner, tokens: Sequence[int]) -> list[Record]:
        """What is here of `tokens`, whether it can be resumed or not."""
        nodes, _ = self._walk(owner, tokens)
        return [node.record for node in nodes if node.record is not None]

    def explain(self, owner: Owner, tokens: Sequence[int], limit: int) -> Explanation:
        """What `match` would find now, and why no more."""
        nodes, known = self._walk(owner, tokens)
        length, depth = self._resumable(nodes, known, limit)
        theirs = _continuation(nodes[-1], known) if nodes and known < len(tokens) else ()
        if min(known, limit) - length >= BEHIND:
            lost = any(node.lost for node in nodes[depth:] if node.end <= known)
            return Explanation(known, length, "evicted" if lost else "checkpoint", theirs)
        return Explanation(known, length, self._reason(owner, tokens, limit, known, theirs), theirs)

    def insert(
        self, owner: Owner, tokens: Sequence[int], end: int, make: Making, *, landmark: bool = False
    ) -> Record | None:
        """Store what is known of tokens[:end] and not yet here; `make(begin, back)` gives the record of [begin, end),
        whose windows reach back to `back`.

        Returns the new record, or None when there is nothing new. A `landmark` is an end that others will share.
        """
        self.shares.come(owner.tenant)
        tokens = tuple(tokens[:end])
        nodes, known = self._walk(owner, tokens)
        if known == end and self._needs.anywhere:
            return None
        parent = nodes[-1] if nodes else self._planted(owner)
        if known < parent.end:
            parent = self._split(parent, known)
        if known == end:
            parent.landmark |= landmark
            return self._refresh(parent, make)
        record = make(known, self._back(parent, known, end))
        node = Node(parent, tokens[known:end], record, end, landmark=landmark)
        parent.children[tokens[known]] = node
        self.shares.add(owner.tenant, record.nbytes)
        self._touch(node)
        self._thin(node)
        return record

    def pin(self, owner: Owner, tokens: Sequence[int]) -> int:
        """Keep what is known of `tokens` while anything else can go; returns how many tokens that are."""
        nodes, known = self._walk(owner, tokens)
        if nodes and known < nodes[-1].end:
            nodes[-1] = self._split(nodes[-1], known)
        for node in nodes:
            node.pinned = True
        return known

    def pinned_bytes(self) -> int:
        return sum(node.record.nbytes for node in self.nodes() if node.pinned and node.record is not None)

    def unpinned_bytes(self, owner: Owner, tokens: Sequence[int]) -> int:
        """What pinning these tokens would add to that, at most."""
        nodes, _ = self._walk(owner, tokens)
        return sum(node.record.nbytes for node in nodes if not node.pinned and node.record is not None)

    def shrink(self, most: int, enough: Callable[[], bool] = lambda: True) -> None:
        """Evict until no more than `most` bytes are held, and until it is `enough`: what running sequences hold as well
        is not evicted for that, as it would free nothing."""
        if self.nbytes <= most and enough():
            return
        queue = EvictionQueue(self.shares, most)
        for tenant in self._roots:
            for salt in self.salts(tenant):
                for node in filter(removable, self.nodes(Owner(tenant, salt))):
                    queue.add(tenant, node)
        while (self.nbytes > most or not enough()) and (found := queue.pop()) is not None:
            tenant, victim = found
            assert victim.record is not None
            if self.nbytes <= most and not victim.record.loose_bytes:
                continue
            self._clock = max(self._clock, victim.worth)
            self._evict(victim)
            parent = victim.parent
            # A parent with a checkpoint is in the queue already.
            if parent is not None and not parent.children and parent.record is not None and not parent.has_checkpoint:
                queue.add(tenant, parent)

    def clear(self, tenant: str) -> int:
        """Forget all of a tenant's; returns the bytes that this frees."""
        freed = sum(
            node.record.nbytes
            for salt in self.salts(tenant)
            for node in self.nodes(Owner(tenant, salt))
            if node.record is not None
        )
        self._roots.pop(tenant, None)
        self.shares.add(tenant, -freed)
        return freed

    def nodes(self, owner: Owner | None = None) -> Iterator[Node]:
        """An owner's, or all of them."""
        if owner is not None:
            root = self._root(owner)
            roots = [] if root is None else [root]
        else:
            roots = [root for salts in self._roots.values() for root in salts.values()]
        for root in roots:
            yield from _below(root)

    def salts(self, tenant: str) -> list[str]:
        """Under which something of a tenant's is kept."""
        return list(self._roots.get(tenant, {}))

    def check(self) -> None:
        held: Counter[str] = Counter()
        for node in self.nodes():
            assert node.record is not None and node.parent is not None
            held[node.tenant] += node.record.nbytes
            assert node.tokens and node.begin == node.parent.end, "a node does not begin where its parent ends"
            assert (node.record.begin, node.record.end) == (node.begin, node.end), "a node's record is of other tokens"
            assert node.parent.children[node.tokens[0]] is node, "a node is not its parent's child"
        assert held == self.shares.held and held.total() == self.nbytes, "the index has lost count of its bytes"

    # Finding

    def _root(self, owner: Owner) -> Node | None:
        return self._roots.get(owner.tenant, {}).get(owner.salt)

    def _walk(self, owner: Owner, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """The nodes along `tokens`, the last one perhaps only in part, and how many tokens agree."""
        tokens = tuple(tokens)
        node, known, found = self._root(owner), 0, []
        while node is not None and known == node.end and known < len(tokens):
            node = node.children.get(tokens[known])
            if node is not None:
                found.append(node)
                known += agreement(node.tokens, tokens[known : known + len(node.tokens)])
        return found, known

    def _resumable(self, nodes: list[Node], known: int, limit: int) -> tuple[int, int]:
        """(length, number of nodes) of the longest prefix from which computing can go on."""
        if self._needs.anywhere:
            length = min(known, limit)
            depth = sum(node.begin < length for node in nodes)
            return length, depth
        for depth in range(len(nodes), 0, -1):
            end = nodes[depth - 1].end
            if end <= min(known, limit) and self._complete(nodes[:depth]):
                return end, depth
        return 0, 0

    def _complete(self, path: list[Node]) -> bool:
        last = path[-1].record
        assert last is not None
        if self._needs.checkpoint and last.checkpoint is None:
            return False
        return all(self._sees(path, group, path[-1].end - window + 1) for group, window in self._needs.windows)

    def _sees(self, path: list[Node], group: int, place: int) -> bool:
        """Whether window layers have all tokens from `place` to the path's end."""
        for node in reversed(path):
            assert node.record is not None
            oldest = node.record.oldest(group)
            if oldest <= max(0, place):
                return True
            if oldest > node.begin:
                return False
        return True

    def _back(self, parent: Node, begin: int, end: int) -> int:
        """Where the windows of a record of [begin, end) begin: with it, if the path before it has what they see of
        earlier tokens. Else as far back as they go, as where a branch leaves in the middle of what was a record."""
        firsts = [(group, end - window + 1) for group, window in self._needs.windows]
        path = parent.path
        return begin if all(first >= begin or self._sees(path, group, first) for group, first in firsts) else 0

    # Explaining

    def _reason(self, owner: Owner, tokens: Sequence[int], limit: int, known: int, theirs: tuple[int, ...]) -> Reason:
        if known >= limit:
            return "complete"
        if self._evicted.holds(owner, tokens, known):
            return "evicted"
        if self._elsewhere(owner, tokens) - known >= TELLING:
            return "salt"
        if theirs:
            return "diverged"
        return "new_turn" if known else "unseen"

    def _elsewhere(self, owner: Owner, tokens: Sequence[int]) -> int:
        """How many of `tokens` are known under another salt of the same tenant."""
        others = (salt for salt in self._roots.get(owner.tenant, {}) if salt != owner.salt)
        salts = itertools.islice(others, SALTS)
        return max((self._walk(Owner(owner.tenant, salt), tokens)[1] for salt in salts), default=0)

    # Changing

    def _planted(self, owner: Owner) -> Node:
        return self._roots.setdefault(owner.tenant, {}).setdefault(owner.salt, Node(None, (), None, owner=owner))

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two where a new branch leaves it; returns the upper half."""
        assert node.record is not None and node.parent is not None
        first, second = node.record.split(at)
        cut = at - node.begin
        upper = Node(node.parent, node.tokens[:cut], first, at, worth=node.worth, uses=node.uses, pinned=node.pinned)
        node.parent.children[node.tokens[0]] = upper
        self.shares.add(node.tenant, first.nbytes + second.nbytes - node.record.nbytes)
        node.parent, node.tokens, node.record = upper, node.tokens[cut:], second
        upper.children[node.tokens[0]] = node
        return upper

    def _refresh(self, node: Node, make: Making) -> Record | None:
        """All tokens are here. A node that cannot be resumed, as it lost its checkpoint or never had one, or lacks what
        windows see, gets that now."""
        if node.record is None or node.parent is None or self._complete(node.path):
            return None
        made = node.record.renewed(make(node.begin, self._back(node.parent, node.begin, node.end)))
        self.shares.add(node.tenant, made.nbytes - node.record.nbytes)
        node.record, node.lost = made, False
        self._touch(node)
        self._thin(node)
        return made

    def _thin(self, node: Node) -> None:
        for spare in list(superfluous(node)):
            self._give_up_checkpoint(spare)

    def _touch(self, node: Node) -> None:
        assert node.record is not None
        uses = min(1 + node.uses, MOST_USES)
        node.worth = self._clock + uses * self._cost(len(node.tokens)) / max(1, node.record.nbytes)

    def _evict(self, node: Node) -> None:
        """A leaf goes; a node that others build on gives up its checkpoint."""
        self.shares.evictions[node.tenant] += 1
        if node.children:
            self._give_up_checkpoint(node)
            node.lost = True
        else:
            self._drop(node)

    def _give_up_checkpoint(self, node: Node) -> None:
        assert node.record is not None
        bare = node.record.without_checkpoint()
        self.shares.add(node.tenant, bare.nbytes - node.record.nbytes)
        node.record = bare

    def _drop(self, node: Node) -> None:
        assert node.record is not None and node.parent is not None
        owner = node.root.owner
        assert owner is not None
        before = [token for above in node.parent.path for token in above.tokens]
        self._evicted.add(owner, before, node.tokens)
        self.shares.add(owner.tenant, -node.record.nbytes)
        del node.parent.children[node.tokens[0]]
        if node.parent.owner is not None and not node.parent.children:
            self._forget(owner)

    def _forget(self, owner: Owner) -> None:
        salts = self._roots[owner.tenant]
        del salts[owner.salt]
        if not salts:
            del self._roots[owner.tenant]


def _below(root: Node) -> Iterator[Node]:
    pending = list(root.children.values())
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        yield node


def _continuation(node: Node, known: int) -> tuple[int, ...]:
    """The first tokens that are kept behind the first `known` of a path that ends in or at the end of `node`."""
    rest = node.tokens[known - node.end + len(node.tokens) :] if known < node.end else ()
    while len(rest) < SNIPPET and node.children:
        node = max(node.children.values(), key=lambda child: child.worth)
        rest += node.tokens
    return rest[:SNIPPET]
