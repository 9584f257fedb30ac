"""A record on disk as the rest of the program knows it: what its header says, without its tensors; and all that are
known of a scope, by name and by what each goes on from."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ingot.cache.disk.header import Header, RecordOwner, digest
from ingot.cache.disk.index import IndexRow, Total

START: Final = digest([])
"""What the digest of the tokens before a record is, where there are none."""
SIBLINGS: Final = 32
"""Records that go on from the same tokens with the same one and are looked at: where one server wrote them there are
one or two, as others go on amid these. Servers that knew nothing of one another may have left more."""
HEAD: Final = 32
"""Tokens by which it is then told which are likely."""
Place = TypeVar("Place", tuple[str, str, int], tuple[str, int, int])


@dataclass(eq=False, slots=True)
class Entry:
    """Shared by the store and by whoever found it there. `lost` is set, by whichever thread, when its file is gone or
    was never written; nothing else changes but when it was used."""

    name: str
    identity: str
    owner: RecordOwner
    before: str
    path: str
    within: str
    oldest: tuple[int, ...]
    begin: int
    tokens: array[int]
    landmark: bool
    checkpoint: bool
    size: int
    used: float = 0.0
    lost: bool = False

    @classmethod
    def of(cls, header: Header, used: float) -> Entry:
        record = header.record
        return cls(
            header.name,
            header.identity,
            header.owner,
            header.before,
            header.path,
            header.within,
            header.oldest,
            record.begin,
            array("q", record.tokens),
            record.landmark,
            record.checkpoint is not None,
            header.nbytes,
            used,
        )

    @classmethod
    def from_row(cls, row: IndexRow) -> Entry:
        """Raises ValueError, TypeError or KeyError where the index holds something else."""
        facts: dict[str, Any] = json.loads(row.facts)
        if not facts["tokens"]:
            raise ValueError("no tokens")
        return cls(
            row.name,
            str(facts["identity"]),
            RecordOwner(str(facts["tenant"]), str(facts["salt"])),
            str(facts["before"]),
            str(facts["path"]),
            str(facts["within"]),
            tuple(int(first) for first in facts["oldest"]),
            int(facts["begin"]),
            array("q", facts["tokens"]),
            bool(facts["landmark"]),
            bool(facts["checkpoint"]),
            row.size,
            row.used,
        )

    def row(self, scope: str) -> IndexRow:
        facts = {
            "identity": self.identity,
            "tenant": self.owner.tenant,
            "salt": self.owner.salt,
            "before": self.before,
            "path": self.path,
            "within": self.within,
            "oldest": self.oldest,
            "begin": self.begin,
            "tokens": self.tokens.tolist(),
            "landmark": self.landmark,
            "checkpoint": self.checkpoint,
        }
        return IndexRow(
            scope, self.name, self.size, self.used, self.begin, json.dumps(facts).encode(), self.owner.tenant
        )

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    def says(self, header: Header) -> bool:
        """Whether a file's header says what the index said of it."""
        record = header.record
        mine = self.identity, self.owner, self.before, self.within, self.oldest, self.tokens.tolist()
        return mine == (header.identity, header.owner, header.before, header.within, header.oldest, [*record.tokens])


class KnownEntries:
    """By name, and by what each goes on from. One thread at a time changes it. Any may look meanwhile, and never waits:
    what it finds here is replaced, and not changed."""

    def __init__(self) -> None:
        self._by_name: dict[str, Entry] = {}
        self._behind: dict[tuple[str, str, int], tuple[Entry, ...]] = {}  # by owner, tokens before, first token
        self._amid: dict[tuple[str, int, int], tuple[Entry, ...]] = {}  # by a record, where in it, first token
        self._forks: dict[str, tuple[int, ...]] = {}  # by a record, where in it others go on,
        self._forked: Counter[tuple[str, int]] = Counter()  # and how many do there
        self._held: dict[str, Total] = {}  # by tenant
        self.total = Total()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Entry]:
        return iter([*self._by_name.values()])

    def get(self, name: str) -> Entry | None:
        return self._by_name.get(name)

    def held(self, tenant: str) -> Total:
        return self._held.get(tenant, Total())

    def add(self, entry: Entry) -> None:
        """In the place of one of the same name, if there is one."""
        self.remove(entry.name)
        self._by_name[entry.name] = entry
        self._count(entry, 1)
        self._put(self._behind, _place(entry), entry)
        if entry.within:
            self._put(self._amid, _fork(entry), entry)
            self._forked[entry.within, entry.begin] += 1
            if self._forked[entry.within, entry.begin] == 1:
                self._forks[entry.within] = (*self._forks.get(entry.within, ()), entry.begin)

    def remove(self, name: str) -> None:
        entry = self._by_name.pop(name, None)
        if entry is None:
            return
        self._count(entry, -1)
        self._take(self._behind, _place(entry), entry)
        if entry.within:
            self._take(self._amid, _fork(entry), entry)
            self._forked[entry.within, entry.begin] -= 1
            if not self._forked[entry.within, entry.begin]:
                del self._forked[entry.within, entry.begin]
                forks = tuple(fork for fork in self._forks.pop(entry.within) if fork != entry.begin)
                if forks:
                    self._forks[entry.within] = forks

    def along(self, owner: RecordOwner, tokens: Sequence[int]) -> Iterator[tuple[Entry, Entry | None]]:
        """An owner's that begin as `tokens` go on there, each with the one that it goes on from, from its end or from
        amid it, which came before. Looks at these alone, and compares tokens: nothing is hashed."""
        wanted, seen = array("q", tokens), set[str]()
        pending: list[tuple[Entry, Entry | None]] = []

        def offer(found: Sequence[Entry], after: Entry | None) -> None:
            found = found if len(found) <= SIBLINGS else _likely(found, wanted)
            pending.extend((entry, after) for entry in found if not entry.lost and entry.name not in seen)

        if wanted:
            offer(self._behind.get((owner.salt, START, wanted[0]), ()), None)
        while pending:
            entry, after = pending.pop()
            if entry.name in seen:
                continue
            seen.add(entry.name)
            yield entry, after
            agreed = entry.begin + _agreement(entry.tokens, wanted[entry.begin : entry.end])
            for fork in self._forks.get(entry.identity, ()):
                if entry.begin < fork <= agreed and fork < min(entry.end, len(wanted)):
                    offer(self._amid.get((entry.identity, fork, wanted[fork]), ()), entry)
            if agreed == entry.end < len(wanted):
                offer(self._behind.get((owner.salt, entry.path, wanted[agreed]), ()), entry)

    def _count(self, entry: Entry, by: int) -> None:
        tenant = entry.owner.tenant
        records, nbytes = self.held(tenant)
        self._held[tenant] = Total(records + by, nbytes + by * entry.size)
        if not self._held[tenant].records:
            del self._held[tenant]
        self.total = Total(self.total.records + by, self.total.nbytes + by * entry.size)

    @staticmethod
    def _put(places: dict[Place, tuple[Entry, ...]], key: Place, entry: Entry) -> None:
        places[key] = (*places.get(key, ()), entry)

    @staticmethod
    def _take(places: dict[Place, tuple[Entry, ...]], key: Place, entry: Entry) -> None:
        left = tuple(each for each in places.pop(key) if each is not entry)
        if left:
            places[key] = left


def _place(entry: Entry) -> tuple[str, str, int]:
    return entry.owner.salt, entry.before, entry.tokens[0]


def _fork(entry: Entry) -> tuple[str, int, int]:
    return entry.within, entry.begin, entry.tokens[0]


def _likely(found: Sequence[Entry], wanted: array[int]) -> Sequence[Entry]:
    """The newest that begin as `wanted` goes on there, or else the newest."""
    begin = found[0].begin
    ahead = {length: wanted[begin : begin + length] for length in range(1, HEAD + 1)}
    alike = [entry for entry in found if entry.tokens[:HEAD] == ahead[min(HEAD, len(entry.tokens))]]
    return (alike or found)[-SIBLINGS:]


def _agreement(one: array[int], other: array[int]) -> int:
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(place for place, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs)
