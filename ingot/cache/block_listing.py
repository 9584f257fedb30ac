"""Which blocks of tokens could be taken over now: what routers before several servers ask to know.

A block is so many tokens that follow one another from a prompt's beginning on, named by a digest of all tokens up to
its end and of whose they are. It counts where computing can go on behind it: as far as a path of the index reaches
where sequences resume after any token, else up to the last place of the path that can be resumed. What is no token, a
picture's digest say, ends a path here: a router could not find it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Literal

from ingot.cache.matches import Needs
from ingot.cache.pages import PAGE
from ingot.cache.prefix_index import PrefixIndex
from ingot.cache.resuming import holds, is_complete
from ingot.cache.tree import Node, Owner

Medium = Literal["GPU", "STORAGE"]
"""Where a block is, in the words of those who ask: in memory, or on disk alone."""
MOST = 1 << 32
"""Keys of the index from here on, and those below 0, are no tokens."""


@dataclass(frozen=True, slots=True)
class Block:
    id: int
    parent: int | None  # the block before it
    tokens: tuple[int, ...]
    owner: Owner
    medium: Medium = "GPU"


@dataclass(frozen=True, slots=True)
class _Chain:
    """What is known at a node's end: its blocks, where the last one ends, and what the next begins with; None where no
    further one can be, after what is no token."""

    blocks: tuple[Block, ...] = ()
    last: int | None = None
    end: int = 0
    rest: tuple[int, ...] | None = ()


NOTHING = _Chain()
_Known = dict[int, tuple[tuple[int, ...], _Chain, _Chain]]
"""By node: its tokens, the chain before it, and its own."""


@dataclass(slots=True)
class _Visited:
    node: Node
    before: int  # the place of the node before it among all that were visited, or -1
    chain: _Chain
    resident: int = 0  # up to where a path through it can be resumed from memory,
    reached: int = 0  # and with what is on disk


class Census:
    """Digests are kept from one count to the next, so that only what is new is computed."""

    def __init__(self, needs: Needs, size: int = PAGE) -> None:
        self.size = size
        self._needs = needs
        self._chains: _Known = {}

    def take(self, index: PrefixIndex) -> dict[int, Block]:
        """All blocks by their ids, each behind the one before it."""
        known, self._chains = self._chains, {}
        found: dict[int, Block] = {}
        for tenant in index.tenants:
            for owner in index.owners(tenant):
                visited = self._visit(index, owner, known)
                for each in visited:
                    found.update((block.id, block) for block in self._counted(each))
        return found

    def _visit(self, index: PrefixIndex, owner: Owner, known: _Known) -> list[_Visited]:
        """The nodes of an owner, each behind the one before it."""
        visited: list[_Visited] = []
        path: list[Node] = []
        pending = [(node, 0, -1) for node in index.first(owner)]
        while pending:
            node, depth, before = pending.pop()
            if not holds(node, "disk"):
                continue
            path[depth:] = [node]
            chain = self._chain(node, visited[before].chain if before >= 0 else NOTHING, owner, known)
            each = _Visited(node, before, chain)
            if is_complete(path, self._needs, "disk"):
                each.reached = node.end
                if node.record is not None and is_complete(path, self._needs, "ram"):
                    each.resident = node.end
            pending.extend((child, depth + 1, len(visited)) for child in node.children.values())
            visited.append(each)
        for each in reversed(visited):
            if each.before >= 0:
                parent = visited[each.before]
                parent.resident = max(parent.resident, each.resident)
                parent.reached = max(parent.reached, each.reached)
        return visited

    def _chain(self, node: Node, before: _Chain, owner: Owner, known: _Known) -> _Chain:
        tokens, since, chain = known.get(id(node), ((), before, before))
        if tokens is not node.tokens or (since.last, since.rest) != (before.last, before.rest):
            chain = self._made(node.tokens, before, owner)
        self._chains[id(node)] = node.tokens, before, chain
        return chain

    def _made(self, added: tuple[int, ...], before: _Chain, owner: Owner) -> _Chain:
        if before.rest is None:
            return replace(before, blocks=())
        plain = added
        if min(added) < 0 or max(added) >= MOST:
            plain = tuple(takewhile(lambda token: 0 <= token < MOST, added))
        tokens, blocks, last = before.rest + plain, [], before.last
        whole = len(tokens) - len(tokens) % self.size
        for begin in range(0, whole, self.size):
            part = tokens[begin : begin + self.size]
            blocks.append(Block(digest(last, part, owner), last, part, owner))
            last = blocks[-1].id
        return _Chain(tuple(blocks), last, before.end + whole, tokens[whole:] if len(plain) == len(added) else None)

    def _counted(self, each: _Visited) -> Iterator[Block]:
        blocks = each.chain.blocks
        begin = each.chain.end - self.size * len(blocks)
        for end, block in zip(range(begin + self.size, each.chain.end + 1, self.size), blocks, strict=True):
            if end <= each.resident:
                yield block
            elif end <= each.reached:
                yield replace(block, medium="STORAGE")


def digest(parent: int | None, tokens: tuple[int, ...], owner: Owner) -> int:
    """The same for the same tokens of the same owner, on every server."""
    hashed = blake2b(digest_size=8)
    if parent is None:
        hashed.update(repr(tuple(owner)).encode())
    else:
        hashed.update(parent.to_bytes(8, "big"))
    hashed.update(array("Q", tokens).tobytes())
    return int.from_bytes(hashed.digest(), "big")
