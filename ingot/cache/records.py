"""Cached records: the immutable KV of tokens [begin, end) of some sequence, in every layer.

Of append and window layers a record holds the pages of the tokens, which it shares with the row that computed them and
with rows that continue from there (of a window only those that a token at `end` still sees); or what those were encoded
to, or both. Of recurrent layers it owns a checkpoint, a copy of their state after token `end`, where one was taken.

The second half serialises records, by layer and free of pages (`UnpagedRecord`), for files. What is read from a file is
checked against the model's own layout before it is written to pages. Only the engine thread may call anything here.
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
from ingot.cache.page_groups import PageGroup
from ingot.cache.pages import PAGE, PageTable, join_tables, pages_for_tokens


@dataclass(frozen=True, slots=True)
class KVPart:
    """Keys and values of tokens [begin, end) in the layers of a group; without pages where that is empty."""

    group: PageGroup
    begin: int
    end: int
    table: PageTable
    charged_from: int
    """The first page that no other record held before: this one is charged for the pages from there on."""

    def __post_init__(self) -> None:
        self.table.charge_pages(self.charged_from)

    def part(self, begin: int, end: int) -> KVPart:
        begin, end = max(begin, self.begin), min(end, self.end)
        if (begin, end) == (self.begin, self.end):
            return self
        if begin >= end:
            return KVPart(self.group, begin, begin, self.table.part(0, 0), begin)
        # If it is cut within a page, both halves hold that page, and the first is charged for it.
        charged_from = self.charged_from if begin == self.begin else max(self.charged_from, pages_for_tokens(begin))
        return KVPart(self.group, begin, end, self.table.part(begin, end), charged_from)

    @property
    def has_pages(self) -> bool:
        """Whether it holds all pages of its tokens."""
        return self.begin >= self.end or (
            self.table.first <= self.begin // PAGE and self.table.end >= pages_for_tokens(self.end)
        )

    def without_pages(self) -> KVPart:
        """The same tokens, which are held encoded. The last page stays if others hold it too, which continue from
        within it: this one remains charged for it."""
        numbers = self.table.numbers[-1:] if self.table.end > self.charged_from else ()
        pages = [page for page in numbers if not self.group.pages.is_held_by_one_record(page)]
        return replace(self, table=PageTable(self.group.pages, self.table.end - len(pages), pages, cached=True))

    @property
    def nbytes(self) -> int:
        return self.group.bytes_of(self.table.numbers[max(0, self.charged_from - self.table.first) :])

    @property
    def idle_bytes(self) -> int:
        return self.group.bytes_of([*filter(self.group.pages.is_idle, self.table.numbers)])


@dataclass(frozen=True, slots=True)
class Record:
    begin: int
    end: int
    parts: tuple[KVPart, ...]  # one for each group
    checkpoint: StateCheckpoint | None = None
    encoded: LayerDeltas | None = None  # the same keys and values encoded, in addition to pages or instead of them
    codec: str = RAW  # that these keys and values went through, or those that they were computed from

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self.encoded_bytes + self.checkpoint_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes that no running row holds: evicting this record, and others with the same pages, would free them."""
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

    def split(self, at: int) -> tuple[Record, Record]:
        """Two records that cover the same tokens. The first has no checkpoint."""
        parts = [self._split(part, at) for part in self.parts]
        first, second = tuple(one for one, _ in parts), tuple(other for _, other in parts)
        upper, lower = (None, None) if self.encoded is None else self.encoded.split(at, self.begin)
        return (
            Record(self.begin, at, first, None, upper, self.codec),
            Record(at, self.end, second, self.checkpoint, lower, self.codec),
        )

    def _split(self, part: KVPart, at: int) -> tuple[KVPart, KVPart]:
        if part.begin < self.begin:
            return part.part(at, at), part  # it reaches back so as to need no record before it, and still does
        return part.part(self.begin, at), part.part(at, self.end)

    def renewed(self, newer: Record) -> Record:
        """This record, with what it lacks from a later one of the same tokens."""
        if self.encoded is not None and any(
            mine.begin > other.begin for mine, other in zip(self.parts, newer.parts, strict=True)
        ):
            return newer  # what is encoded cannot be replaced in part
        parts = (
            mine if mine.begin <= other.begin else other for mine, other in zip(self.parts, newer.parts, strict=True)
        )
        codec = self.codec if newer.codec == RAW else newer.codec
        return replace(self, parts=tuple(parts), checkpoint=newer.checkpoint, codec=codec)

    def without_checkpoint(self) -> Record:
        return replace(self, checkpoint=None)

    def oldest(self, group: int) -> int:
        """The first token whose keys and values it has in a group; its end where it has none."""
        return self.parts[group].begin


def take_record(rows: BatchState, row: Row, begin: int, back: int | None = None) -> Record:
    """A record of a row from token `begin` to its end, with a checkpoint.

    Window layers begin there too, or at `back`, where no other record has the earlier tokens that its end sees.
    """
    parts = [
        record_part_of_row(group, row, begin if back is None or group.window is None else back) for group in rows.groups
    ]
    return Record(begin, row.length, tuple(parts), rows.checkpoint(row))


def record_part_of_row(group: PageGroup, row: Row, first: int) -> KVPart:
    """A record's part in a group, of a row's tokens from `first` on."""
    table, end = row.tables[group.number], row.length
    oldest = first if group.window is None else max(first, end - group.window + 1)
    begin = min(max(oldest, table.first * PAGE), end)
    cached = map(group.pages.is_cached, table.numbers[max(0, begin // PAGE - table.first) :])
    charged_from = begin // PAGE + next((index for index, held in enumerate(cached) if not held), table.end)
    return KVPart(group, begin, end, table.part(begin, end), charged_from)


def restore_row(rows: BatchState, row: Row, records: Sequence[Record], length: int) -> None:
    """Make an empty row hold the first `length` tokens of consecutive records from token 0 on.

    Raises RuntimeError where a token is missing that some layer sees.
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
    """The end of the tokens from `oldest` on that they hold without a gap."""
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
    """A record's contents, outside of pages."""

    begin: int
    end: int
    deltas: LayerDeltas
    checkpoint: StateCheckpoint | None

    def arrays(self) -> list[mx.array]:
        return self.deltas.arrays() + ([] if self.checkpoint is None else self.checkpoint.arrays())

    def behind(self, begin: int) -> UnpagedRecord:
        """The part behind token `begin`. Windows that reach back further still do."""
        if begin == self.begin:
            return self
        return replace(self, begin=begin, deltas=self.deltas.behind(begin, self.begin))

    def before(self, end: int) -> UnpagedRecord:
        """The part before token `end`, without the checkpoint."""
        if end == self.end:
            return self
        return replace(self, end=end, deltas=self.deltas.before(end, self.begin), checkpoint=None)


def unpage_record(rows: BatchState, record: Record) -> UnpagedRecord:
    """The contents of a record that has its pages, with coded pages decoded."""
    deltas = read_deltas(rows.states, record_extents(record), read_raw_delta)
    return UnpagedRecord(record.begin, record.end, deltas, record.checkpoint)


def unpage_record_as_stored(rows: BatchState, record: Record) -> UnpagedRecord:
    """The same, with full coded pages as they are."""
    deltas = read_deltas(rows.states, record_extents(record), read_stored_delta)
    return UnpagedRecord(record.begin, record.end, deltas, record.checkpoint)


def record_extents(record: Record) -> list[KVExtent]:
    """The extents of a record that has its pages, by group."""
    return [part_extent(part) for part in record.parts]


def part_extent(part: KVPart) -> KVExtent:
    pages = part.table.numbers[part.begin // PAGE - part.table.first :] if part.begin < part.end else ()
    return KVExtent(part.begin, part.end, part.group.places(pages))


def place_record(rows: BatchState, before: Sequence[Record], loose: UnpagedRecord) -> Record:
    """Write a record to pages. `before` are records of the tokens before it; every state has storage."""
    parts = tuple(place_record_part(rows, group, before, loose.deltas) for group in rows.groups)
    mx.eval(rows.pending())
    return Record(loose.begin, loose.end, parts, loose.checkpoint)


def place_record_part(rows: BatchState, group: PageGroup, before: Sequence[Record], deltas: LayerDeltas) -> KVPart:
    """The same for the layers of one group. The caller evaluates what is pending."""
    delta, _ = deltas_of_group(rows.states, group, deltas)[0]
    table, held = _begin_coded_table(rows, group, delta) if delta.coded else _begin_table(group, before, delta.begin)
    slots = group.coded_slots(table.numbers[: delta.coded])
    copies = table.grow(held, delta.end)
    rows.provide(group)
    rows.copy(group, copies)
    rows.lay(group, deltas, KVPlacement(slots, held, group.runs(table, held, delta.end)))
    return record_part_of_row(group, Row(0, (*[table] * len(rows.groups),), delta.end), delta.begin)


def _begin_table(group: PageGroup, before: Sequence[Record], begin: int) -> tuple[PageTable, int]:
    """A table that ends with the page of token `begin`, if an earlier record has it, and up to where it is written."""
    number = begin // PAGE
    for record in reversed(before):
        part = record.parts[group.number]
        if begin % PAGE and part.table.first <= number < part.table.end:
            page = part.table.numbers[number - part.table.first]
            return PageTable(group.pages, number, [page]), min(begin, part.end)
    return PageTable(group.pages, number), number * PAGE


def _begin_coded_table(rows: BatchState, group: PageGroup, delta: KVDelta) -> tuple[PageTable, int]:
    """A table of as many full coded pages, and where they end."""
    table = PageTable(group.pages, delta.begin // PAGE)
    table.add_coded(delta.coded)
    assert group.coded is not None
    rows.provide(group.coded)
    return table, table.end * PAGE


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
    return StateCheckpoint(tuple(next(arrays) if stored else None for stored in layer) for layer in piece.checkpoint)


@dataclass(frozen=True, slots=True)
class RecordForm:
    """The layout of this model's records: a sample; by layer its group and whether that has a window; and by layer the
    layout of coded pages, where these may be written as they are."""

    sample: UnpagedRecord
    groups: tuple[tuple[int, bool] | None, ...]
    pages: tuple[CodedPageLayout | None, ...]


def fit_record(record: UnpagedRecord, form: RecordForm) -> UnpagedRecord:
    """A record that was read from a file, with its coded pages recognised. Raises ArchiveError unless its layout is
    this model's: otherwise a wrong shape would fail a step that others share, and a gap would expose what a page held
    before."""
    if len(record.deltas) == len(form.pages):
        deltas = map(_with_page_layout, record.deltas, form.pages)
        record = replace(record, deltas=LayerDeltas(deltas))
    if not _record_fits(record, form):
        raise ArchiveError("The file's tensors are not laid out like this model's.")
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
    for layer, (delta, expected) in enumerate(zip(record.deltas, sample.deltas, strict=True)):
        if delta is None or expected is None:
            if delta is not expected:
                return False
        elif not (_delta_covers_record(delta, record, form, layer) and _same_shapes(delta, expected)):
            return False
    if record.checkpoint is None or sample.checkpoint is None:
        return record.checkpoint is None
    return len(record.checkpoint) == len(sample.checkpoint) and all(
        map(_same_parts, record.checkpoint, sample.checkpoint)
    )


def _delta_covers_record(delta: KVDelta, record: UnpagedRecord, form: RecordForm, layer: int) -> bool:
    """Whether it covers its record, as an append layer's must; a window layer's may begin later, or be empty and begin
    behind the record. All layers of a group begin and end alike."""
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


def _same_shapes(delta: KVDelta, sample: KVDelta) -> bool:
    if isinstance(delta, CodedDelta) and not delta.has_valid_pages:
        return False
    raw = delta.raw
    if not raw.arrays:
        return True
    if len(raw.arrays) != len(sample.arrays):
        return False
    for array, like in zip(raw.arrays, sample.arrays, strict=True):
        tokens = raw.end - raw.begin if like.shape[TOKEN_AXIS] == sample.end - sample.begin else 1
        if tuple(array.shape) != (*like.shape[:2], tokens, *like.shape[3:]) or array.dtype != like.dtype:
            return False
    return True


def _same_parts(parts: tuple[mx.array | None, ...], sample: tuple[mx.array | None, ...]) -> bool:
    return len(parts) == len(sample) and all(map(_same_part, parts, sample))


def _same_part(part: mx.array | None, like: mx.array | None) -> bool:
    if part is None or like is None:
        return part is like
    # The second axis of a history of the newest tokens is as long as its sequence at first.
    other_axes = (part.shape[:1], part.shape[2:]) == (like.shape[:1], like.shape[2:])
    if part.dtype != like.dtype or part.ndim != like.ndim or not other_axes:
        return False
    return part.ndim <= 1 or part.shape[1] <= like.shape[1]


def _array_bytes(array: mx.array) -> bytes:
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.asarray(plain).tobytes()


def _array_from_bytes(tensor: TensorShape, raw: bytes | memoryview) -> mx.array:
    plain = mx.array(np.frombuffer(raw, _NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape))
    return plain.view(mx.bfloat16) if tensor.dtype == "BF16" else plain.astype(_DTYPES[tensor.dtype])
