"""The nodes of the radix index: tokens that follow one another, each piece with the record that was made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ingot.cache.disk.header import PathHash, extended, path_hash
from ingot.cache.filed import FiledRecord
from ingot.cache.records import Record


class Owner(NamedTuple):
    """Whose tokens these are. Owners share nothing; of another tenant's nothing is even told."""

    tenant: str = ""
    salt: str = ""
    exact: bool = False  # takes and leaves nothing that went through a codec, where others do
    lora: str = ""  # the digest of the adapter that the states went through

    @property
    def words(self) -> tuple[str, str, str, str]:
        return self.tenant, self.salt, "exact" if self.exact else "", self.lora


class Tally(NamedTuple):
    """What is in memory of some nodes."""

    records: int = 0
    tokens: int = 0
    checkpoints: int = 0
    pinned_tokens: int = 0
    bytes: int = 0
    pinned_bytes: int = 0

    def plus(self, other: Tally, sign: int = 1) -> Tally:
        return Tally(*(mine + sign * theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Tally()


@dataclass(eq=False, slots=True)
class Node:
    """Tokens up to `end` of its path, and what was computed of them: a record in memory, one on disk, or both. What is
    in memory goes on from what is. A root, and only that, has an owner; it has no tokens and no record."""

    parent: Node | None
    tokens: tuple[int, ...]
    record: Record | None
    end: int = 0
    children: dict[int, Node] = field(default_factory=dict)
    worth: float = 0.0
    touched: float = 0.0  # how worth counts time, when it was last used,
    turn: int = 0  # and how many times any was before
    uses: int = 0  # prompts that it was a part of
    resumed: int = 0  # sequences that went on from its end
    landmark: bool = False  # its end is one that new conversations share, such as the system prompt's
    pinned: bool = False
    lost: bool = False  # its checkpoint was evicted
    owner: Owner | None = None
    filed: FiledRecord | None = None
    hashed: PathHash | None = None  # of all tokens up to its end, once somebody asked
    resident_children: int = 0  # those that have a record in memory
    tally: Tally = NOTHING  # of a root: what is in memory of all nodes below it
    root: Node = field(init=False)

    def __post_init__(self) -> None:
        self.root = self if self.parent is None else self.parent.root

    @property
    def begin(self) -> int:
        return self.end - len(self.tokens)

    @property
    def root_owner(self) -> Owner:
        owner = self.root.owner
        assert owner is not None
        return owner

    @property
    def tenant(self) -> str:
        return self.root_owner.tenant

    @property
    def path(self) -> list[Node]:
        """From the first node below the root to this one."""
        found: list[Node] = []
        node: Node | None = self
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
        """Of all tokens up to its end: those alone are hashed that were not before."""
        behind: list[Node] = []
        node = self
        while node.hashed is None and node.parent is not None:
            behind.append(node)
            node = node.parent
        hashed = node.hashed or path_hash()
        for node in reversed(behind):
            hashed = node.hashed = extended(hashed, node.tokens)
        return hashed

    @property
    def is_filed(self) -> bool:
        return self.filed is not None and self.filed.there

    @property
    def has_filed_checkpoint(self) -> bool:
        return self.filed is not None and self.filed.there and self.filed.has_checkpoint

    @property
    def is_saved(self) -> bool:
        """Nothing that it has in memory is missing on disk."""
        if self.filed is None or not self.filed.there:
            return False
        return self.record is None or self.filed.holds_all_of(self.record)

    @property
    def is_last_in_memory(self) -> bool:
        """Nothing in memory goes on from it."""
        return not self.resident_children

    @property
    def has_checkpoint(self) -> bool:
        return self.record is not None and self.record.has_checkpoint

    @property
    def own_tally(self) -> Tally:
        """What is in memory of this node."""
        if self.record is None:
            return NOTHING
        tokens, nbytes, pinned = len(self.tokens), self.record.nbytes, int(self.pinned)
        return Tally(1, tokens, int(self.record.has_checkpoint), tokens * pinned, nbytes, nbytes * pinned)


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:  # the ordinary case
        return shorter
    agreed, differ = 0, shorter  # by halves, as comparing slices is many times faster than comparing tokens
    while differ - agreed > 1:
        middle = (agreed + differ) // 2
        if one[agreed:middle] == other[agreed:middle]:
            agreed = middle
        else:
            differ = middle
    return agreed
