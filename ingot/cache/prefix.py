"""The radix index: which prefixes of which sequences are computed already, and where each can be resumed.

A tree of tokens for each salt. A node covers tokens [begin, end) of its path and owns a record of them. The contract:

- `match` finds how far a prompt is known and the furthest point from which it can be resumed: the longest one where
  every kind of layer has what it needs. It changes nothing but how recently the nodes were used.
- `insert` adds what a sequence computed beyond what is known; what is known already is not stored twice.
- `shrink` evicts until the index holds no more than so many bytes: least worth first, where worth is the time it
  takes to compute again per byte, and is forgotten with age. Pinned nodes stay.
- `check` raises if the books are wrong.

Pure Python: it asks of a record only its bytes, its split, and what its layers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ingot.cache.records import Record


@dataclass(frozen=True, slots=True)
class Needs:
    """What resuming needs, by the model's layers: a checkpoint, and the tokens that each window still sees."""

    checkpoint: bool = False
    windows: tuple[tuple[int, int], ...] = ()  # (layer, window)

    @property
    def anywhere(self) -> bool:
        """A sequence can be resumed after any of its tokens, not only at a node's end."""
        return not self.checkpoint and not self.windows


@dataclass(frozen=True, slots=True)
class Match:
    """`known` tokens of the prompt are in the index; the first `length` can be taken over from `records`."""

    known: int = 0
    length: int = 0
    records: tuple[Record, ...] = ()


@dataclass(eq=False, slots=True)
class Node:
    parent: Node | None
    tokens: tuple[int, ...]
    record: Record | None  # None for a root
    children: dict[int, Node] = field(default_factory=dict)
    worth: float = 0.0
    pinned: bool = False

    @property
    def end(self) -> int:
        return self.record.end if self.record else 0

    @property
    def path(self) -> list[Node]:
        """From the first node below the root to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.record is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


class PrefixIndex:
    def __init__(self, needs: Needs, cost: Callable[[int], float]) -> None:
        """`cost(n)` is the time in seconds that computing n tokens takes."""
        self._needs, self._cost = needs, cost
        self._roots: dict[str, Node] = {}
        self._clock = 0.0
        self.nbytes = 0

    def match(self, salt: str, tokens: Sequence[int], limit: int) -> Match:
        """What of `tokens` is here. At most the first `limit` are offered, so that something is left to compute."""
        nodes, known = self._walk(salt, tokens)
        for node in nodes:
            self._touch(node)
        length, depth = self._resumable(nodes, known, limit)
        records = tuple(node.record for node in nodes[:depth] if node.record is not None)
        return Match(known, length, records)

    def insert(self, salt: str, tokens: Sequence[int], end: int, make: Callable[[int], Record]) -> Record | None:
        """Store what is known of tokens[:end] and not yet here; `make(begin)` gives the record of [begin, end).

        Returns the new record, or None when there is nothing new.
        """
        tokens = tuple(tokens[:end])
        nodes, known = self._walk(salt, tokens)
        if known == end and self._needs.anywhere:
            return None
        parent = nodes[-1] if nodes else self._roots.setdefault(salt, Node(None, (), None))
        if known < parent.end:
            parent = self._split(parent, known)
        if known == end:
            return self._refresh(parent, end, make)
        record = make(known)
        node = Node(parent, tokens[known:end], record)
        parent.children[tokens[known]] = node
        self.nbytes += record.nbytes
        self._touch(node)
        return record

    def pin(self, salt: str, tokens: Sequence[int]) -> int:
        """Keep what is known of `tokens` whatever happens; returns how many tokens that are."""
        nodes, _ = self._walk(salt, tokens)
        for node in nodes:
            node.pinned = True
        return nodes[-1].end if nodes else 0

    def shrink(self, most: int) -> None:
        while self.nbytes > most and (victim := self._least_worth()) is not None:
            self._clock = max(self._clock, victim.worth)
            self._evict(victim)

    def nodes(self) -> Iterator[Node]:
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if node.record is not None:
                yield node

    def check(self) -> None:
        held = 0
        for node in self.nodes():
            assert node.record is not None and node.parent is not None
            held += node.record.nbytes
            assert len(node.tokens) == node.record.end - node.record.begin > 0, "a node's tokens are not its record's"
            assert node.record.begin == node.parent.end, "a node does not begin where its parent ends"
            assert node.parent.children[node.tokens[0]] is node, "a node is not its parent's child"
        assert held == self.nbytes, "the index has lost count of its bytes"

    # Finding

    def _walk(self, salt: str, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """The nodes along `tokens`, the last one perhaps only in part, and how many tokens agree."""
        tokens = tuple(tokens)
        node, known, found = self._roots.get(salt), 0, []
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
            depth = sum(node.end - len(node.tokens) < length for node in nodes)
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
        return all(self._sees(path, layer, last.end - window + 1) for layer, window in self._needs.windows)

    def _sees(self, path: list[Node], layer: int, position: int) -> bool:
        for node in reversed(path):
            assert node.record is not None
            if not node.record.sees_back_to(position, layer):
                return False
            if node.record.begin <= position:
                return True
        return True

    # Changing

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two where a new branch leaves it; returns the upper half."""
        assert node.record is not None and node.parent is not None
        first, second = node.record.split(at)
        cut = at - node.record.begin
        upper = Node(node.parent, node.tokens[:cut], first, worth=node.worth, pinned=node.pinned)
        node.parent.children[node.tokens[0]] = upper
        self.nbytes += first.nbytes + second.nbytes - node.record.nbytes
        node.parent, node.tokens, node.record = upper, node.tokens[cut:], second
        upper.children[node.tokens[0]] = node
        return upper

    def _refresh(self, node: Node, end: int, make: Callable[[int], Record]) -> Record | None:
        """All tokens are here. A node that lost its checkpoint, or never had one, gets it now."""
        if node.record is None or not self._needs.checkpoint or node.record.checkpoint is not None:
            return None
        made = make(node.record.begin)
        self.nbytes += made.nbytes - node.record.nbytes
        node.record = made
        self._touch(node)
        return made

    def _touch(self, node: Node) -> None:
        assert node.record is not None
        node.worth = self._clock + self._cost(len(node.tokens)) / max(1, node.record.nbytes)

    def _least_worth(self) -> Node | None:
        loose = (node for node in self.nodes() if not node.pinned and self._removable(node))
        return min(loose, key=lambda node: node.worth, default=None)

    def _removable(self, node: Node) -> bool:
        assert node.record is not None
        return not node.children or node.record.checkpoint is not None

    def _evict(self, node: Node) -> None:
        """A leaf goes; a node that others build on gives up its checkpoint."""
        assert node.record is not None and node.parent is not None
        self.nbytes -= node.record.nbytes
        if node.children:
            node.record = node.record.without_checkpoint()
            self.nbytes += node.record.nbytes
        else:
            del node.parent.children[node.tokens[0]]


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:  # many times faster than the loop, and the ordinary case
        return shorter
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
