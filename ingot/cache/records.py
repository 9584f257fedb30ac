"""Immutable pieces of computed state: what tokens [begin, end) of some sequence left in every layer.

Of append and window layers a record holds the pages that the tokens lie in, which it shares with the row that computed
them and with whoever goes on from there (of a window only those that a token at `end` can still see); or what those
were encoded to, or both. Of recurrent layers it owns a checkpoint, a copy of their state after token `end`, where one
was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ingot.cache.batch_state import Rows
from ingot.cache.checkpoint import Checkpoint
from ingot.cache.codecs.names import RAW
from ingot.cache.deltas import Deltas
from ingot.cache.forward_batch import Row
from ingot.cache.page_groups import PageGroup
from ingot.cache.pages import PAGE, Table, joined, pages_of


@dataclass(frozen=True, slots=True)
class KVPart:
    """Keys and values of tokens [begin, end) in the layers of a group; no pages when that is empty."""

    group: PageGroup
    begin: int
    end: int
    table: Table
    paid: int
    """The number of the first page that nobody kept before it: those from there on are counted as this record's."""

    def __post_init__(self) -> None:
        self.table.pay(self.paid)

    def part(self, begin: int, end: int) -> KVPart:
        begin, end = max(begin, self.begin), min(end, self.end)
        if (begin, end) == (self.begin, self.end):
            return self
        if begin >= end:
            return KVPart(self.group, begin, begin, self.table.part(0, 0), begin)
        # Where it is cut in the middle of a page, both halves hold that page, and the first one pays for it.
        paid = self.paid if begin == self.begin else max(self.paid, pages_of(begin))
        return KVPart(self.group, begin, end, self.table.part(begin, end), paid)

    @property
    def has_pages(self) -> bool:
        """All that its tokens lie in."""
        return self.begin >= self.end or (
            self.table.first <= self.begin // PAGE and self.table.end >= pages_of(self.end)
        )

    def without_pages(self) -> KVPart:
        """The same tokens, which are held otherwise. The last page stays where others hold it too, and count on this
        one to pay for it: they go on from inside of it."""
        numbers = self.table.numbers[-1:] if self.table.end > self.paid else ()
        kept = [page for page in numbers if not self.group.pages.is_loose(page)]
        return replace(self, table=Table(self.group.pages, self.table.end - len(kept), kept, kept=True))

    @property
    def nbytes(self) -> int:
        return self.group.bytes_of(self.table.numbers[max(0, self.paid - self.table.first) :])

    @property
    def idle_bytes(self) -> int:
        return self.group.bytes_of([*filter(self.group.pages.is_idle, self.table.numbers)])


@dataclass(frozen=True, slots=True)
class Record:
    begin: int
    end: int
    parts: tuple[KVPart, ...]  # one for each group
    checkpoint: Checkpoint | None = None
    encoded: Deltas | None = None  # the same keys and values in fewer bits, beside pages or instead of them
    codec: str = RAW  # what these states went through, or those that they were computed from

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self.encoded_bytes + self.checkpoint_bytes

    @property
    def idle_bytes(self) -> int:
        """What no running row holds: it would be free without this record, and those that hold the same pages."""
        return sum(part.idle_bytes for part in self.parts) + self.encoded_bytes + self.checkpoint_bytes

    @property
    def encoded_bytes(self) -> int:
        return 0 if self.encoded is None else self.encoded.nbytes

    @property
    def has_pages(self) -> bool:
        return all(part.has_pages for part in self.parts)

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoint is not None

    @property
    def checkpoint_bytes(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.nbytes

    def checkpoint_arrays(self) -> list[mx.array]:
        return [] if self.checkpoint is None else self.checkpoint.arrays()

    def split(self, at: int) -> tuple[Record, Record]:
        """Two records that cover the same tokens; what the first's end looked like to recurrent layers is unknown."""
        parts = [self._split(part, at) for part in self.parts]
        first, second = tuple(one for one, _ in parts), tuple(other for _, other in parts)
        upper, lower = (None, None) if self.encoded is None else self.encoded.split(at, self.begin)
        return (
            Record(self.begin, at, first, None, upper, self.codec),
            Record(at, self.end, second, self.checkpoint, lower, self.codec),
        )

    def _split(self, part: KVPart, at: int) -> tuple[KVPart, KVPart]:
        if part.begin < self.begin:
            return part.part(at, at), part  # it reaches back so as to need nobody before it, and still does
        return part.part(self.begin, at), part.part(at, self.end)

    def renewed(self, newer: Record) -> Record:
        """The same tokens' record with what it lacks from one that was made later."""
        if self.encoded is not None and any(
            mine.begin > other.begin for mine, other in zip(self.parts, newer.parts, strict=True)
        ):
            return newer  # what is encoded is so as a whole
        parts = (
            mine if mine.begin <= other.begin else other for mine, other in zip(self.parts, newer.parts, strict=True)
        )
        codec = self.codec if newer.codec == RAW else newer.codec
        return replace(self, parts=tuple(parts), checkpoint=newer.checkpoint, codec=codec)

    def without_checkpoint(self) -> Record:
        return replace(self, checkpoint=None)

    def oldest(self, group: int) -> int:
        """The first token whose keys and values it has in a group; behind its end where it has none."""
        return self.parts[group].begin


def take(rows: Rows, row: Row, begin: int, back: int | None = None) -> Record:
    """A record of what a row computed from token `begin` to its end, with a checkpoint.

    Window layers begin there too, or at `back`, where nobody has what a token at its end sees of earlier ones.
    """
    parts = [kept_part(group, row, begin if back is None or group.window is None else back) for group in rows.groups]
    return Record(begin, row.length, tuple(parts), rows.checkpoint(row))


def kept_part(group: PageGroup, row: Row, first: int) -> KVPart:
    """What a record of a row's tokens from `first` on holds in a group."""
    table, end = row.tables[group.number], row.length
    oldest = first if group.window is None else max(first, end - group.window + 1)
    begin = min(max(oldest, table.first * PAGE), end)
    kept = map(group.pages.is_kept, table.numbers[max(0, begin // PAGE - table.first) :])
    paid = begin // PAGE + next((number for number, known in enumerate(kept) if not known), table.end)
    return KVPart(group, begin, end, table.part(begin, end), paid)


def put(rows: Rows, row: Row, records: Sequence[Record], length: int) -> None:
    """Make an empty row hold the first `length` tokens of what the records, in order, cover from token 0 on.

    Raises RuntimeError where they leave out a token that some layer sees: a row is never longer than what it holds.
    """
    assert row.length == 0 and records[0].begin == 0 and records[-1].end >= length
    tables = []
    for group in rows.groups:
        oldest = 0 if group.window is None else max(0, length - group.window + 1)
        table = joined(group.pages, [record.parts[group.number].table for record in records], oldest, length)
        if table is None or reach(records, group.number, oldest) < length:
            raise RuntimeError(f"records of group {group.number} do not reach from token {oldest} to {length}")
        tables.append(table)
    if "recurrent" in rows.kinds:
        checkpoint = records[-1].checkpoint
        assert checkpoint is not None and records[-1].end == length
        rows.resume(row, checkpoint)
    row.tables = tuple(tables)
    row.length = row.position = length


def reach(records: Sequence[Record], group: int, oldest: int) -> int:
    """Up to where they hold every token from `oldest` on."""
    reached = oldest
    for record in records:
        part = record.parts[group]
        if part.begin <= reached:
            reached = max(reached, part.end)
    return reached
