"""Block listing: which blocks of tokens could be reused now, for routers in front of several servers.

A block is a fixed number of consecutive tokens, identified by a hash of all tokens up to its end and of their owner. It
is listed if computing can resume behind it: to the end of each path of the index where sequences can resume after any
token, otherwise up to the path's last resume point. A key that is not a token, such as an image's digest, ends a path
here, as a router could not look it up.
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
"""Where a block is, in the words of KV events: in memory, or only on disk."""
TOKEN_LIMIT = 1 << 32
"""Keys of the index from here on, and negative ones, are not tokens."""


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    id: int
    parent: int | None  # the block before it
    tokens: tuple[int, ...]
    owner: CacheOwner
    medium: BlockMedium = "GPU"


@dataclass(frozen=True, slots=True)
class _BlockChain:
    """The blocks that end in a node, the id and the end of the last one up to there, and the tokens behind it; None
    behind a key that is not a token."""

    blocks: tuple[PrefixBlock, ...] = ()
    last: int | None = None
    end: int = 0
    partial: tuple[int, ...] | None = ()


EMPTY_CHAIN = _BlockChain()
_ChainCache = dict[int, tuple[tuple[int, ...], _BlockChain, _BlockChain]]
"""By node: its tokens, its parent's chain, and its own."""


@dataclass(slots=True)
class _VisitedNode:
    node: PrefixNode
    parent: int  # the parent's index among all that were visited, or -1
    chain: _BlockChain
    resident: int = 0  # the last resume point on a path through it, from memory
    reached: int = 0  # and with what is on disk


class BlockListing:
    """Hashes are cached from one listing to the next, so that only new ones are computed."""

    def __init__(self, needs: ResumeNeeds, size: int = PAGE) -> None:
        self.size = size
        self._needs = needs
        self._chains: _ChainCache = {}

    def take(self, index: PrefixIndex) -> dict[int, PrefixBlock]:
        """All blocks by their ids, each behind its parent."""
        earlier, self._chains = self._chains, {}
        found: dict[int, PrefixBlock] = {}
        for tenant in index.tenants:
            for owner in index.owners(tenant):
                for visited in self._visit(index, owner, earlier):
                    found.update((block.id, block) for block in self._reusable_blocks(visited))
        return found

    def _visit(self, index: PrefixIndex, owner: CacheOwner, earlier: _ChainCache) -> list[_VisitedNode]:
        """The nodes of an owner, each behind its parent."""
        visited: list[_VisitedNode] = []
        path: list[PrefixNode] = []
        pending = [(node, 0, -1) for node in index.first(owner)]
        while pending:
            node, depth, parent = pending.pop()
            if not node_holds(node, "disk"):
                continue
            path[depth:] = [node]
            chain = self._chain(node, visited[parent].chain if parent >= 0 else EMPTY_CHAIN, owner, earlier)
            each = _VisitedNode(node, parent, chain)
            if can_resume_at_end(path, self._needs, "disk"):
                each.reached = node.end
                if node.record is not None and can_resume_at_end(path, self._needs, "ram"):
                    each.resident = node.end
            pending.extend((child, depth + 1, len(visited)) for child in node.children.values())
            visited.append(each)
        for each in reversed(visited):
            if each.parent >= 0:
                above = visited[each.parent]
                above.resident = max(above.resident, each.resident)
                above.reached = max(above.reached, each.reached)
        return visited

    def _chain(self, node: PrefixNode, parent: _BlockChain, owner: CacheOwner, earlier: _ChainCache) -> _BlockChain:
        tokens, since, chain = earlier.get(id(node), ((), parent, parent))
        if tokens is not node.tokens or (since.last, since.partial) != (parent.last, parent.partial):
            chain = self._make_chain(node.tokens, parent, owner)
        self._chains[id(node)] = node.tokens, parent, chain
        return chain

    def _make_chain(self, added: tuple[int, ...], parent: _BlockChain, owner: CacheOwner) -> _BlockChain:
        if parent.partial is None:
            return replace(parent, blocks=())
        plain = added
        if min(added) < 0 or max(added) >= TOKEN_LIMIT:
            plain = tuple(takewhile(lambda token: 0 <= token < TOKEN_LIMIT, added))
        tokens, blocks, last = parent.partial + plain, [], parent.last
        whole = len(tokens) - len(tokens) % self.size
        for begin in range(0, whole, self.size):
            part = tokens[begin : begin + self.size]
            blocks.append(PrefixBlock(block_hash(last, part, owner), last, part, owner))
            last = blocks[-1].id
        return _BlockChain(
            tuple(blocks), last, parent.end + whole, tokens[whole:] if len(plain) == len(added) else None
        )

    def _reusable_blocks(self, each: _VisitedNode) -> Iterator[PrefixBlock]:
        blocks = each.chain.blocks
        begin = each.chain.end - self.size * len(blocks)
        for end, block in zip(range(begin + self.size, each.chain.end + 1, self.size), blocks, strict=True):
            if end <= each.resident:
                yield block
            elif end <= each.reached:
                yield replace(block, medium="STORAGE")


def block_hash(parent: int | None, tokens: tuple[int, ...], owner: CacheOwner) -> int:
    """The same on every server for the same tokens of the same owner."""
    hashed = blake2b(digest_size=8)
    if parent is None:
        hashed.update(repr(tuple(owner)).encode())
    else:
        hashed.update(parent.to_bytes(8, "big"))
    hashed.update(array("Q", tokens).tobytes())
    return int.from_bytes(hashed.digest(), "big")
