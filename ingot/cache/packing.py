"""Records as bytes and back, for files: by layer, and free of pages. Only the engine thread may call anything
here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ingot.cache.archive import ArchiveError
from ingot.cache.batch_state import Rows
from ingot.cache.checkpoint import Checkpoint
from ingot.cache.coded_deltas import CodedDelta
from ingot.cache.coded_pages import PageForm
from ingot.cache.deltas import TOKENS, Deltas, KVDelta
from ingot.cache.forward_batch import Row
from ingot.cache.kv_deltas import Berth, Extent, of_group, raw_delta, read, stored_delta
from ingot.cache.page_groups import PageGroup, Run
from ingot.cache.pages import PAGE, Table
from ingot.cache.records import KVPart, Record, kept_part
from ingot.cache.stored import StoredRecord, TensorShape

_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int32: "I32",
    mx.uint32: "U32",
    mx.int64: "I64",
    mx.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BYTES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U8": "u1"}


@dataclass(frozen=True, slots=True)
class LooseRecord:
    """What a record holds, outside of any pages."""

    begin: int
    end: int
    deltas: Deltas
    checkpoint: Checkpoint | None

    def arrays(self) -> list[mx.array]:
        return self.deltas.arrays() + ([] if self.checkpoint is None else self.checkpoint.arrays())

    def behind(self, begin: int) -> LooseRecord:
        """What of it lies behind a token. What reaches back before it does so still."""
        if begin == self.begin:
            return self
        return replace(self, begin=begin, deltas=self.deltas.behind(begin, self.begin))

    def before(self, end: int) -> LooseRecord:
        """What of it lies before a token. What the states at its end looked like goes with that end."""
        if end == self.end:
            return self
        return replace(self, end=end, deltas=self.deltas.before(end, self.begin), checkpoint=None)


def loosened(rows: Rows, record: Record) -> LooseRecord:
    """Of a record that has its pages, which are unpacked."""
    return LooseRecord(record.begin, record.end, read(rows.states, extents(record), raw_delta), record.checkpoint)


def as_stored(rows: Rows, record: Record) -> LooseRecord:
    """The same, with whole pages in fewer bits as they lie, where they are."""
    return LooseRecord(record.begin, record.end, read(rows.states, extents(record), stored_delta), record.checkpoint)


def extents(record: Record) -> list[Extent]:
    """Where a record that has its pages lies, by group."""
    return [extent_of(part) for part in record.parts]


def extent_of(part: KVPart) -> Extent:
    pages = part.table.numbers[part.begin // PAGE - part.table.first :] if part.begin < part.end else ()
    return Extent(part.begin, part.end, part.group.places(pages))


def laid(rows: Rows, before: Sequence[Record], loose: LooseRecord) -> Record:
    """Put what a record holds into pages. `before` are records of the tokens before it; every state has storage."""
    parts = tuple(laid_part(rows, group, before, loose.deltas) for group in rows.groups)
    mx.eval(rows.pending())
    return Record(loose.begin, loose.end, parts, loose.checkpoint)


def laid_part(rows: Rows, group: PageGroup, before: Sequence[Record], deltas: Deltas) -> KVPart:
    """The same for the layers of one group; the caller has what is pending computed."""
    delta, _ = of_group(rows.states, group, deltas)[0]
    table, held = _begun_coded(rows, group, delta) if delta.coded else _begun(group, before, delta.begin)
    slots = group.coded_slots(table.numbers[: delta.coded])
    copies = table.grow(held, delta.end)
    rows.provide(group)
    rows.copy(group, copies)
    rows.lay(group, deltas, Berth(slots, held, _runs(group, table, held, delta.end)))
    return kept_part(group, Row(0, (*[table] * len(rows.groups),), delta.end), delta.begin)


def _begun(group: PageGroup, before: Sequence[Record], begin: int) -> tuple[Table, int]:
    """A table that ends with the page of token `begin`, as far as somebody has it, and how far that is."""
    number = begin // PAGE
    for record in reversed(before):
        part = record.parts[group.number]
        if begin % PAGE and part.table.first <= number < part.table.end:
            page = part.table.numbers[number - part.table.first]
            return Table(group.pages, number, [page]), min(begin, part.end)
    return Table(group.pages, number), number * PAGE


def _begun_coded(rows: Rows, group: PageGroup, delta: KVDelta) -> tuple[Table, int]:
    """A table of as many pages in fewer bits, whole ones, and where they end."""
    table = Table(group.pages, delta.begin // PAGE)
    table.add_coded(delta.coded)
    assert group.coded is not None
    rows.provide(group.coded)
    return table, table.end * PAGE


def _runs(group: PageGroup, table: Table, begin: int, end: int) -> list[Run]:
    runs: list[Run] = []
    place = begin
    while place < end:
        count = min(PAGE - place % PAGE, end - place)
        slot = group.slot_of(table.numbers[place // PAGE - table.first])
        runs.append((place - begin, count, slot, place % PAGE))
        place += count
    return runs


def described(record: LooseRecord, tokens: tuple[int, ...], *, landmark: bool) -> StoredRecord:
    deltas = tuple(None if delta is None else (delta.begin, delta.end, len(delta.arrays)) for delta in record.deltas)
    checkpoint = record.checkpoint
    return StoredRecord(
        tokens,
        record.begin,
        landmark,
        deltas,
        None if checkpoint is None else tuple(tuple(part is not None for part in layer) for layer in checkpoint),
        tuple(TensorShape(_NAMES[array.dtype], tuple(array.shape)) for array in record.arrays()),
    )


def packed(record: LooseRecord) -> list[bytes]:
    arrays = record.arrays()
    mx.eval(arrays)  # at once: one by one would take much longer
    return [_raw(array) for array in arrays]


def unpacked(piece: StoredRecord, data: Sequence[bytes | memoryview]) -> LooseRecord:
    arrays = iter([_array(tensor, raw) for tensor, raw in zip(piece.tensors, data, strict=True)])
    deltas = Deltas(
        None if delta is None else KVDelta(delta[0], delta[1], tuple(next(arrays) for _ in range(delta[2])))
        for delta in piece.deltas
    )
    return LooseRecord(piece.begin, piece.end, deltas, _checkpoint(piece, arrays))


def _checkpoint(piece: StoredRecord, arrays: Iterator[mx.array]) -> Checkpoint | None:
    if piece.checkpoint is None:
        return None
    return Checkpoint(tuple(next(arrays) if there else None for there in layer) for layer in piece.checkpoint)


@dataclass(frozen=True, slots=True)
class Form:
    """What this model's records look like: one of them, and by layer its group and whether that keeps only a window,
    and what its pages are in fewer bits, where they may be written so."""

    sample: LooseRecord
    groups: tuple[tuple[int, bool] | None, ...]
    pages: tuple[PageForm | None, ...]


def fitted(record: LooseRecord, form: Form) -> LooseRecord:
    """A record that was read, whose pages in fewer bits are known for what they are. Raises ArchiveError unless it
    holds what one of this model's does: a wrong shape would otherwise only be found in the middle of a step that others
    share, and a gap would show what a page held before."""
    if len(record.deltas) == len(form.pages):
        known = Deltas(_known(delta, pages) for delta, pages in zip(record.deltas, form.pages, strict=True))
        record = replace(record, deltas=known)
    if not _fits(record, form):
        raise ArchiveError("The file holds other states than this model's.")
    return record


def _known(delta: KVDelta | None, pages: PageForm | None) -> KVDelta | None:
    """Raw keys and values are two arrays; pages come before them, or alone."""
    if delta is None or pages is None or len(delta.arrays) not in (1, 3) or delta.arrays[0].ndim != 3:
        return delta
    return CodedDelta(delta.begin, delta.end, delta.arrays, pages)


def _fits(record: LooseRecord, form: Form) -> bool:
    sample = form.sample
    if len(record.deltas) != len(sample.deltas):
        return False
    for layer, (mine, theirs) in enumerate(zip(record.deltas, sample.deltas, strict=True)):
        if mine is None or theirs is None:
            if mine is not theirs:
                return False
        elif not (_in_place(mine, record, form, layer) and _same_shapes(mine, theirs)):
            return False
    if record.checkpoint is None or sample.checkpoint is None:
        return record.checkpoint is None
    return len(record.checkpoint) == len(sample.checkpoint) and all(
        _same_parts(mine, theirs) for mine, theirs in zip(record.checkpoint, sample.checkpoint, strict=True)
    )


def _in_place(delta: KVDelta, record: LooseRecord, form: Form, layer: int) -> bool:
    """Whether it covers its record, as an append layer's must; a window layer's may begin later, or hold nothing and
    say so by beginning behind the record. Layers of a group begin and end alike."""
    kind = form.groups[layer]
    assert kind is not None
    first = record.deltas[form.groups.index(kind)]
    if first is None or _extent(first) != _extent(delta):
        return False
    if not kind[1]:
        return (delta.begin, delta.end) == (record.begin, record.end) and bool(delta.arrays)
    if not delta.arrays:
        return record.end <= delta.begin == delta.end
    return 0 <= delta.begin < delta.end == record.end


def _extent(delta: KVDelta) -> tuple[int, int, bool, int]:
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
        tokens = mine.end - mine.begin if known.shape[TOKENS] == theirs.end - theirs.begin else 1
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


def _raw(array: mx.array) -> bytes:
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.asarray(plain).tobytes()


def _array(tensor: TensorShape, raw: bytes | memoryview) -> mx.array:
    plain = mx.array(np.frombuffer(raw, _BYTES[tensor.dtype]).reshape(tensor.shape))
    return plain.view(mx.bfloat16) if tensor.dtype == "BF16" else plain.astype(_DTYPES[tensor.dtype])
