"""Cached records: immutable pieces of computed state, what tokens [begin, end) of some sequence left in every layer.

Of append and window layers a record holds the pages that the tokens lie in, which it shares with the row that computed
them and with whoever goes on from there (of a window only those that a token at `end` can still see); or what those
were encoded to, or both. Of recurrent layers it owns a checkpoint, a copy of their state after token `end`, where one
was taken.

The second half serialises records, by layer and free of pages (`UnpagedRecord`), for files. What is read from a file is
checked against the model's own form before it is placed into pages. Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ingot.cache.archive import ArchiveError, StoredRecord, TensorShape
from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.names import RAW
from ingot.cache.coded_pages import CodedPageLayout
from ingot.cache.forward_batch import Row
from ingot.cache.kv_deltas import (
    TOKEN_AXIS,
    CodedDelta,
    KVDelta,
    KVExtent,
    KVPlacement,
    LayerDeltas,
    StateCheckpoint,
    deltas_of_group,
    read_deltas,
    read_raw_delta,
    read_stored_delta,
)
from ingot.cache.page_groups import PageGroup, TokenRun
from ingot.cache.pages import PAGE, PageTable, join_tables, pages_for_tokens


@dataclass(frozen=True, slots=True)
class KVPart:
    """Keys and values of tokens [begin, end) in the layers of a group; no pages when that is empty."""

    group: PageGroup
    begin: int
    end: int
    table: PageTable
    paid: int
    """The number of the first page that nobody kept before it: those from there on are counted as this record's."""

    def __post_init__(self) -> None:
        self.table.charge_pages(self.paid)

    def part(self, begin: int, end: int) -> KVPart:
        begin, end = max(begin, self.begin), min(end, self.end)
        if (begin, end) == (self.begin, self.end):
            return self
        if begin >= end:
            return KVPart(self.group, begin, begin, self.table.part(0, 0), begin)
        # Where it is cut in the middle of a page, both halves hold that page, and the first one pays for it.
        paid = self.paid if begin == self.begin else max(self.paid, pages_for_tokens(begin))
        return KVPart(self.group, begin, end, self.table.part(begin, end), paid)

    @property
    def has_pages(self) -> bool:
        """All that its tokens lie in."""
        return self.begin >= self.end or (
            self.table.first <= self.begin // PAGE and self.table.end >= pages_for_tokens(self.end)
        )

    def without_pages(self) -> KVPart:
        """The same tokens, which are held otherwise. The last page stays where others hold it too, and count on this
        one to pay for it: they go on from inside of it."""
        numbers = self.table.numbers[-1:] if self.table.end > self.paid else ()
        kept = [page for page in numbers if not self.group.pages.is_held_once(page)]
        return replace(self, table=PageTable(self.group.pages, self.table.end - len(kept), kept, kept=True))

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
    checkpoint: StateCheckpoint | None = None
    encoded: LayerDeltas | None = None  # the same keys and values in fewer bits, beside pages or instead of them
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


def take_record(rows: BatchState, row: Row, begin: int, back: int | None = None) -> Record:
    """A record of what a row computed from token `begin` to its end, with a checkpoint.

    Window layers begin there too, or at `back`, where nobody has what a token at its end sees of earlier ones.
    """
    parts = [
        record_part_of_row(group, row, begin if back is None or group.window is None else back) for group in rows.groups
    ]
    return Record(begin, row.length, tuple(parts), rows.checkpoint(row))


def record_part_of_row(group: PageGroup, row: Row, first: int) -> KVPart:
    """What a record of a row's tokens from `first` on holds in a group."""
    table, end = row.tables[group.number], row.length
    oldest = first if group.window is None else max(first, end - group.window + 1)
    begin = min(max(oldest, table.first * PAGE), end)
    kept = map(group.pages.is_kept, table.numbers[max(0, begin // PAGE - table.first) :])
    paid = begin // PAGE + next((number for number, known in enumerate(kept) if not known), table.end)
    return KVPart(group, begin, end, table.part(begin, end), paid)


def restore_row(rows: BatchState, row: Row, records: Sequence[Record], length: int) -> None:
    """Make an empty row hold the first `length` tokens of what the records, in order, cover from token 0 on.

    Raises RuntimeError where they leave out a token that some layer sees: a row is never longer than what it holds.
    """
    assert row.length == 0 and records[0].begin == 0 and records[-1].end >= length
    tables = []
    for group in rows.groups:
        oldest = 0 if group.window is None else max(0, length - group.window + 1)
        table = join_tables(group.pages, [record.parts[group.number].table for record in records], oldest, length)
        if table is None or records_reach(records, group.number, oldest) < length:
            raise RuntimeError(f"records of group {group.number} do not reach from token {oldest} to {length}")
        tables.append(table)
    if "recurrent" in rows.kinds:
        checkpoint = records[-1].checkpoint
        assert checkpoint is not None and records[-1].end == length
        rows.resume(row, checkpoint)
    row.tables = tuple(tables)
    row.length = row.position = length


def records_reach(records: Sequence[Record], group: int, oldest: int) -> int:
    """Up to where they hold every token from `oldest` on."""
    reached = oldest
    for record in records:
        part = record.parts[group]
        if part.begin <= reached:
            reached = max(reached, part.end)
    return reached


_DTYPE_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int32: "I32",
    mx.uint32: "U32",
    mx.int64: "I64",
    mx.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U8": "u1"}


@dataclass(frozen=True, slots=True)
class UnpagedRecord:
    """What a record holds, outside of any pages."""

    begin: int
    end: int
    deltas: LayerDeltas
    checkpoint: StateCheckpoint | None

    def arrays(self) -> list[mx.array]:
        return self.deltas.arrays() + ([] if self.checkpoint is None else self.checkpoint.arrays())

    def behind(self, begin: int) -> UnpagedRecord:
        """What of it lies behind a token. What reaches back before it does so still."""
        if begin == self.begin:
            return self
        return replace(self, begin=begin, deltas=self.deltas.behind(begin, self.begin))

    def before(self, end: int) -> UnpagedRecord:
        """What of it lies before a token. What the states at its end looked like goes with that end."""
        if end == self.end:
            return self
        return replace(self, end=end, deltas=self.deltas.before(end, self.begin), checkpoint=None)


def unpage_record(rows: BatchState, record: Record) -> UnpagedRecord:
    """Of a record that has its pages, which are unpacked."""
    return UnpagedRecord(
        record.begin, record.end, read_deltas(rows.states, record_extents(record), read_raw_delta), record.checkpoint
    )


def unpage_record_as_stored(rows: BatchState, record: Record) -> UnpagedRecord:
    """The same, with whole pages in fewer bits as they lie, where they are."""
    return UnpagedRecord(
        record.begin, record.end, read_deltas(rows.states, record_extents(record), read_stored_delta), record.checkpoint
    )


def record_extents(record: Record) -> list[KVExtent]:
    """Where a record that has its pages lies, by group."""
    return [part_extent(part) for part in record.parts]


def part_extent(part: KVPart) -> KVExtent:
    pages = part.table.numbers[part.begin // PAGE - part.table.first :] if part.begin < part.end else ()
    return KVExtent(part.begin, part.end, part.group.places(pages))


def place_record(rows: BatchState, before: Sequence[Record], loose: UnpagedRecord) -> Record:
    """Put what a record holds into pages. `before` are records of the tokens before it; every state has storage."""
    parts = tuple(place_record_part(rows, group, before, loose.deltas) for group in rows.groups)
    mx.eval(rows.pending())
    return Record(loose.begin, loose.end, parts, loose.checkpoint)


def place_record_part(rows: BatchState, group: PageGroup, before: Sequence[Record], deltas: LayerDeltas) -> KVPart:
    """The same for the layers of one group; the caller has what is pending computed."""
    delta, _ = deltas_of_group(rows.states, group, deltas)[0]
    table, held = _begin_coded_table(rows, group, delta) if delta.coded else _begin_table(group, before, delta.begin)
    slots = group.coded_slots(table.numbers[: delta.coded])
    copies = table.grow(held, delta.end)
    rows.provide(group)
    rows.copy(group, copies)
    rows.lay(group, deltas, KVPlacement(slots, held, _page_runs(group, table, held, delta.end)))
    return record_part_of_row(group, Row(0, (*[table] * len(rows.groups),), delta.end), delta.begin)


def _begin_table(group: PageGroup, before: Sequence[Record], begin: int) -> tuple[PageTable, int]:
    """A table that ends with the page of token `begin`, as far as somebody has it, and how far that is."""
    number = begin // PAGE
    for record in reversed(before):
        part = record.parts[group.number]
        if begin % PAGE and part.table.first <= number < part.table.end:
            page = part.table.numbers[number - part.table.first]
            return PageTable(group.pages, number, [page]), min(begin, part.end)
    return PageTable(group.pages, number), number * PAGE


def _begin_coded_table(rows: BatchState, group: PageGroup, delta: KVDelta) -> tuple[PageTable, int]:
    """A table of as many pages in fewer bits, whole ones, and where they end."""
    table = PageTable(group.pages, delta.begin // PAGE)
    table.add_coded(delta.coded)
    assert group.coded is not None
    rows.provide(group.coded)
    return table, table.end * PAGE


def _page_runs(group: PageGroup, table: PageTable, begin: int, end: int) -> list[TokenRun]:
    runs: list[TokenRun] = []
    place = begin
    while place < end:
        count = min(PAGE - place % PAGE, end - place)
        slot = group.slot_of(table.numbers[place // PAGE - table.first])
        runs.append((place - begin, count, slot, place % PAGE))
        place += count
    return runs


def describe_record(record: UnpagedRecord, tokens: tuple[int, ...], *, landmark: bool) -> StoredRecord:
    deltas = tuple(None if delta is None else (delta.begin, delta.end, len(delta.arrays)) for delta in record.deltas)
    checkpoint = record.checkpoint
    return StoredRecord(
        tokens,
        record.begin,
        landmark,
        deltas,
        None if checkpoint is None else tuple(tuple(part is not None for part in layer) for layer in checkpoint),
        tuple(TensorShape(_DTYPE_NAMES[array.dtype], tuple(array.shape)) for array in record.arrays()),
    )


def serialise_record(record: UnpagedRecord) -> list[bytes]:
    arrays = record.arrays()
    mx.eval(arrays)  # at once: one by one would take much longer
    return [_array_bytes(array) for array in arrays]


def deserialise_record(piece: StoredRecord, data: Sequence[bytes | memoryview]) -> UnpagedRecord:
    arrays = iter([_array_from_bytes(tensor, raw) for tensor, raw in zip(piece.tensors, data, strict=True)])
    deltas = LayerDeltas(
        None if delta is None else KVDelta(delta[0], delta[1], tuple(next(arrays) for _ in range(delta[2])))
        for delta in piece.deltas
    )
    return UnpagedRecord(piece.begin, piece.end, deltas, _deserialise_checkpoint(piece, arrays))


def _deserialise_checkpoint(piece: StoredRecord, arrays: Iterator[mx.array]) -> StateCheckpoint | None:
    if piece.checkpoint is None:
        return None
    return StateCheckpoint(tuple(next(arrays) if there else None for there in layer) for layer in piece.checkpoint)


@dataclass(frozen=True, slots=True)
class RecordForm:
    """What this model's records look like: one of them, and by layer its group and whether that keeps only a window,
    and what its pages are in fewer bits, where they may be written so."""

    sample: UnpagedRecord
    groups: tuple[tuple[int, bool] | None, ...]
    pages: tuple[CodedPageLayout | None, ...]


def fit_record(record: UnpagedRecord, form: RecordForm) -> UnpagedRecord:
    """A record that was read, whose pages in fewer bits are known for what they are. Raises ArchiveError unless it
    holds what one of this model's does: a wrong shape would otherwise only be found in the middle of a step that others
    share, and a gap would show what a page held before."""
    if len(record.deltas) == len(form.pages):
        known = LayerDeltas(
            _with_page_layout(delta, pages) for delta, pages in zip(record.deltas, form.pages, strict=True)
        )
        record = replace(record, deltas=known)
    if not _record_fits(record, form):
        raise ArchiveError("The file holds other states than this model's.")
    return record


def _with_page_layout(delta: KVDelta | None, pages: CodedPageLayout | None) -> KVDelta | None:
    """Raw keys and values are two arrays; pages come before them, or alone."""
    if delta is None or pages is None or len(delta.arrays) not in (1, 3) or delta.arrays[0].ndim != 3:
        return delta
    return CodedDelta(delta.begin, delta.end, delta.arrays, pages)


def _record_fits(record: UnpagedRecord, form: RecordForm) -> bool:
    sample = form.sample
    if len(record.deltas) != len(sample.deltas):
        return False
    for layer, (mine, theirs) in enumerate(zip(record.deltas, sample.deltas, strict=True)):
        if mine is None or theirs is None:
            if mine is not theirs:
                return False
        elif not (_delta_in_place(mine, record, form, layer) and _same_shapes(mine, theirs)):
            return False
    if record.checkpoint is None or sample.checkpoint is None:
        return record.checkpoint is None
    return len(record.checkpoint) == len(sample.checkpoint) and all(
        _same_parts(mine, theirs) for mine, theirs in zip(record.checkpoint, sample.checkpoint, strict=True)
    )


def _delta_in_place(delta: KVDelta, record: UnpagedRecord, form: RecordForm, layer: int) -> bool:
    """Whether it covers its record, as an append layer's must; a window layer's may begin later, or hold nothing and
    say so by beginning behind the record. Layers of a group begin and end alike."""
    kind = form.groups[layer]
    assert kind is not None
    first = record.deltas[form.groups.index(kind)]
    if first is None or _delta_extent(first) != _delta_extent(delta):
        return False
    if not kind[1]:
        return (delta.begin, delta.end) == (record.begin, record.end) and bool(delta.arrays)
    if not delta.arrays:
        return record.end <= delta.begin == delta.end
    return 0 <= delta.begin < delta.end == record.end


def _delta_extent(delta: KVDelta) -> tuple[int, int, bool, int]:
    return delta.begin, delta.end, bool(delta.arrays), delta.coded


def _same_shapes(mine: KVDelta, theirs: KVDelta) -> bool:
    if isinstance(mine, CodedDelta) and not mine.is_sound:
        return False
    mine = mine.raw
    if not mine.arrays:
        return True
    if len(mine.arrays) != len(theirs.arrays):
        return False
    for array, known in zip(mine.arrays, theirs.arrays, strict=True):
        tokens = mine.end - mine.begin if known.shape[TOKEN_AXIS] == theirs.end - theirs.begin else 1
        expected = (*known.shape[:2], tokens, *known.shape[3:])
        if tuple(array.shape) != expected or array.dtype != known.dtype:
            return False
    return True


def _same_parts(mine: tuple[mx.array | None, ...], theirs: tuple[mx.array | None, ...]) -> bool:
    if len(mine) != len(theirs):
        return False
    for part, known in zip(mine, theirs, strict=True):
        if part is None or known is None:
            if part is not known:
                return False
            continue
        # The second axis of a history of the newest tokens is as long as its sequence at first.
        rest = (part.shape[:1], part.shape[2:]) == (known.shape[:1], known.shape[2:])
        if part.dtype != known.dtype or part.ndim != known.ndim or not rest:
            return False
        if part.ndim > 1 and part.shape[1] > known.shape[1]:
            return False
    return True


def _array_bytes(array: mx.array) -> bytes:
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.asarray(plain).tobytes()


def _array_from_bytes(tensor: TensorShape, raw: bytes | memoryview) -> mx.array:
    plain = mx.array(np.frombuffer(raw, _NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape))
    return plain.view(mx.bfloat16) if tensor.dtype == "BF16" else plain.astype(_DTYPES[tensor.dtype])
