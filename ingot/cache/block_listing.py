"""Block listing: which blocks of tokens could be reused now, for routers in front of several servers.

A block is so many tokens that follow one another from a prompt's beginning on, named by a digest of all tokens up to
its end and of whose they are. It counts where computing can go on behind it: as far as a path of the index reaches
where sequences resume after any token, else up to the last place of the path that can be resumed. What is no token, an
image's digest say, ends a path here: a router could not find it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Literal

from ingot.cache.pages import PAGE
from ingot.cache.prefix_index import PrefixIndex, ResumeNeeds, can_resume_at_end, node_holds
from ingot.cache.prefix_tree import CacheOwner, PrefixNode

BlockMedium = Literal["GPU", "STORAGE"]
"""Where a block is, in the words of those who ask: in memory, or on disk alone."""
TOKEN_LIMIT = 1 << 32
"""Keys of the index from here on, and those below 0, are no tokens."""


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    id: int
    parent: int | None  # the block before it
    tokens: tuple[int, ...]
    owner: CacheOwner
    medium: BlockMedium = "GPU"


@dataclass(frozen=True, slots=True)
class _BlockChain:
    """What is known at a node's end: its blocks, where the last one ends, and what the next begins with; None where no
    further one can be, after what is no token."""

    blocks: tuple[PrefixBlock, ...] = ()
    last: int | None = None
    end: int = 0
    rest: tuple[int, ...] | None = ()


EMPTY_CHAIN = _BlockChain()
_KnownChains = dict[int, tuple[tuple[int, ...], _BlockChain, _BlockChain]]
"""By node: its tokens, the chain before it, and its own."""


@dataclass(slots=True)
class _VisitedNode:
    node: PrefixNode
    before: int  # the place of the node before it among all that were visited, or -1
    chain: _BlockChain
    resident: int = 0  # up to where a path through it can be resumed from memory,
    reached: int = 0  # and with what is on disk


class BlockListing:
    """Digests are kept from one count to the next, so that only what is new is computed."""

    def __init__(self, needs: ResumeNeeds, size: int = PAGE) -> None:
        self.size = size
        self._needs = needs
        self._chains: _KnownChains = {}

    def take(self, index: PrefixIndex) -> dict[int, PrefixBlock]:
        """All blocks by their ids, each behind the one before it."""
        known, self._chains = self._chains, {}
        found: dict[int, PrefixBlock] = {}
        for tenant in index.tenants:
            for owner in index.owners(tenant):
                visited = self._visit(index, owner, known)
                for each in visited:
                    found.update((block.id, block) for block in self._counted(each))
        return found

    def _visit(self, index: PrefixIndex, owner: CacheOwner, known: _KnownChains) -> list[_VisitedNode]:
        """The nodes of an owner, each behind the one before it."""
        visited: list[_VisitedNode] = []
        path: list[PrefixNode] = []
        pending = [(node, 0, -1) for node in index.first(owner)]
        while pending:
            node, depth, before = pending.pop()
            if not node_holds(node, "disk"):
                continue
            path[depth:] = [node]
            chain = self._chain(node, visited[before].chain if before >= 0 else EMPTY_CHAIN, owner, known)
            each = _VisitedNode(node, before, chain)
            if can_resume_at_end(path, self._needs, "disk"):
                each.reached = node.end
                if node.record is not None and can_resume_at_end(path, self._needs, "ram"):
                    each.resident = node.end
            pending.extend((child, depth + 1, len(visited)) for child in node.children.values())
            visited.append(each)
        for each in reversed(visited):
            if each.before >= 0:
                parent = visited[each.before]
                parent.resident = max(parent.resident, each.resident)
                parent.reached = max(parent.reached, each.reached)
        return visited

    def _chain(self, node: PrefixNode, before: _BlockChain, owner: CacheOwner, known: _KnownChains) -> _BlockChain:
        tokens, since, chain = known.get(id(node), ((), before, before))
        if tokens is not node.tokens or (since.last, since.rest) != (before.last, before.rest):
            chain = self._made(node.tokens, before, owner)
        self._chains[id(node)] = node.tokens, before, chain
        return chain

    def _made(self, added: tuple[int, ...], before: _BlockChain, owner: CacheOwner) -> _BlockChain:
        if before.rest is None:
            return replace(before, blocks=())
        plain = added
        if min(added) < 0 or max(added) >= TOKEN_LIMIT:
            plain = tuple(takewhile(lambda token: 0 <= token < TOKEN_LIMIT, added))
        tokens, blocks, last = before.rest + plain, [], before.last
        whole = len(tokens) - len(tokens) % self.size
        for begin in range(0, whole, self.size):
            part = tokens[begin : begin + self.size]
            blocks.append(PrefixBlock(block_hash(last, part, owner), last, part, owner))
            last = blocks[-1].id
        return _BlockChain(
            tuple(blocks), last, before.end + whole, tokens[whole:] if len(plain) == len(added) else None
        )

    def _counted(self, each: _VisitedNode) -> Iterator[PrefixBlock]:
        blocks = each.chain.blocks
        begin = each.chain.end - self.size * len(blocks)
        for end, block in zip(range(begin + self.size, each.chain.end + 1, self.size), blocks, strict=True):
            if end <= each.resident:
                yield block
            elif end <= each.reached:
                yield replace(block, medium="STORAGE")


def block_hash(parent: int | None, tokens: tuple[int, ...], owner: CacheOwner) -> int:
    """The same for the same tokens of the same owner, on every server."""
    hashed = blake2b(digest_size=8)
    if parent is None:
        hashed.update(repr(tuple(owner)).encode())
    else:
        hashed.update(parent.to_bytes(8, "big"))
    hashed.update(array("Q", tokens).tobytes())
    return int.from_bytes(hashed.digest(), "big")
