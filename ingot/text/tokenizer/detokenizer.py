"""Stop strings, found in a stream of text however it is cut into pieces.

An Aho-Corasick automaton reads each character once, so the cost is linear in the text whatever the strings are. Its
state is the longest suffix of the text that could still become a stop string: exactly what must be held back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from ingot.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Released:
    """Text that is safe to send, and the stop string that ended the stream, if one did."""

    text: str
    stopped_by: str | None


@dataclass(slots=True)
class _Node:
    depth: int
    next: dict[str, int]
    fallback: int = 0  # the node of the longest proper suffix that is in the trie
    found: str | None = None  # the longest stop string that ends here


@lru_cache(maxsize=32)
def _automaton(strings: tuple[str, ...]) -> tuple[_Node, ...]:
    nodes = [_Node(0, {})]
    for string in strings:
        at = 0
        for char in string:
            if char not in nodes[at].next:
                nodes[at].next[char] = len(nodes)
                nodes.append(_Node(nodes[at].depth + 1, {}))
            at = nodes[at].next[char]
        nodes[at].found = string
    _link(nodes)
    return tuple(nodes)


def _link(nodes: list[_Node]) -> None:
    """Breadth first, so that a node's fallback, being shallower, is complete before the node needs it."""
    queue = deque(nodes[0].next.values())
    while queue:
        node = nodes[queue.popleft()]
        for char, child in node.next.items():
            queue.append(child)
            nodes[child].fallback = _step(nodes, node.fallback, char)
            if nodes[child].found is None:
                nodes[child].found = nodes[nodes[child].fallback].found


def _step(nodes: list[_Node] | tuple[_Node, ...], at: int, char: str) -> int:
    while at and char not in nodes[at].next:
        at = nodes[at].fallback
    return nodes[at].next.get(char, 0)


class StopMatcher:
    """Ends a stream of text at the first stop string that is complete in it.

    The match that ends earliest wins, as a reader of the stream would see it; of several that end at the same
    character, the longest. With `keep` the matched string stays in the text, else the text ends before it. What
    comes out, all pushes taken together, does not depend on how the text was cut. Nothing follows a stop.
    """

    def __init__(self, strings: tuple[str, ...], keep: bool) -> None:
        if "" in strings:
            raise BadRequest("A stop string must not be empty.", param="stop")
        self._nodes = _automaton(strings)
        self._keep = keep
        self._at = 0
        self._held: deque[str] = deque()
        self._held_size = 0
        self._stopped_by: str | None = None

    def push(self, text: str) -> Released:
        if self._stopped_by is not None or not text:
            return Released("", self._stopped_by)
        before = self._held_size
        self._held.append(text)
        self._held_size += len(text)
        read = self._read(text)
        if self._stopped_by is None:
            # Kept text is sent whether or not it becomes a match, so there is nothing to wait for.
            waiting = 0 if self._keep else self._nodes[self._at].depth
            return Released(self._take(self._held_size - waiting), None)
        end = before + read
        released = self._take(end if self._keep else end - len(self._stopped_by))
        self._held.clear()
        self._held_size = 0
        return Released(released, self._stopped_by)

    def flush(self) -> str:
        """The text has ended: what was held back for a match that never came."""
        return self._take(self._held_size)

    def _read(self, text: str) -> int:
        """Advance over `text`, up to the end of a match if there is one; the number of characters read."""
        nodes, at = self._nodes, self._at
        if len(nodes) == 1:
            return len(text)
        for index, char in enumerate(text):
            at = _step(nodes, at, char)
            if nodes[at].found is not None:
                self._stopped_by = nodes[at].found
                return index + 1
        self._at = at
        return len(text)

    def _take(self, size: int) -> str:
        """The first `size` held characters. Pieces, not one string: held text is never copied again and again."""
        taken = []
        self._held_size -= size
        while size > 0:
            piece = self._held.popleft()
            if len(piece) > size:
                self._held.appendleft(piece[size:])
                piece = piece[:size]
            taken.append(piece)
            size -= len(piece)
        return "".join(taken)
