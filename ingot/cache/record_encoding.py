"""What records are put into when they leave their pages, for files or for less memory, and how they come back.

Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.names import RAW
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.disk.record_file import StoredData
from ingot.cache.kv_deltas import DeltaCodec, LayerDeltas, deltas_of_group, layers_of_group, read_deltas, read_raw_delta
from ingot.cache.page_groups import PageGroup
from ingot.cache.pages import PAGE, PageTable
from ingot.cache.records import (
    KVPart,
    Record,
    RecordForm,
    UnpagedRecord,
    deserialise_record,
    fit_record,
    place_record,
    place_record_part,
    record_extents,
    unpage_record_as_stored,
)
from ingot.errors import ConfigError


class RecordEncoding:
    """What leaves its pages stays as it is, bit for bit: raw, or in the fewer bits that live pages are in."""

    lossy = False

    def __init__(self, rows: BatchState) -> None:
        self._rows = rows
        self.name = RAW if rows.codec is None else str(rows.codec.name)
        """What records went through that it gives."""

    def form(self, form: RecordForm) -> RecordForm:
        """What records look like outside of pages, for one that has them raw."""
        return form

    def loose(self, record: Record) -> UnpagedRecord:
        """A record as it is written to files."""
        return unpage_record_as_stored(self._rows, record)

    def opened(self, found: StoredData, form: RecordForm) -> UnpagedRecord:
        """What was read from one. Raises ArchiveError unless it is of that form."""
        return fit_record(deserialise_record(found.header.record, found.tensors), form)

    def taken(self, before: Sequence[Record], loose: UnpagedRecord) -> Record:
        """A record of what was read; `before` are those of the tokens before it."""
        return replace(place_record(self._rows, before, loose), codec=self.name)


class LossyEncoding(RecordEncoding):
    """Keys and values in fewer bits. Windows keep their place; checkpoints stay as they are."""

    lossy = True

    def __init__(self, rows: BatchState, codec: PairCodec, form: RecordForm) -> None:
        """`form` is that of raw records. Raises ConfigError where the model's states cannot be encoded."""
        super().__init__(rows)
        self.name = str(codec.name)
        self._codec = DeltaCodec(codec, form.sample.deltas)
        if self._codec.is_idle:
            raise codec_refused_error(codec, "this model keeps no keys and values")
        check_codec_fits(codec, self._codec)
        sizes = self._codec.sizes(rows.states)
        self._sizes = tuple(sizes.get(group.window, (0, 0)) for group in rows.groups)

    def form(self, form: RecordForm) -> RecordForm:
        return encode_form(self._codec, form)

    def loose(self, record: Record) -> UnpagedRecord:
        return UnpagedRecord(record.begin, record.end, self._deltas(record), record.checkpoint)

    def taken(self, before: Sequence[Record], loose: UnpagedRecord) -> Record:
        """Without pages: it gets some when a sequence goes on from it."""
        parts = []
        for group in self._rows.groups:
            delta, _ = deltas_of_group(self._rows.states, group, loose.deltas)[0]
            parts.append(KVPart(group, delta.begin, delta.end, PageTable(group.pages, kept=True), delta.begin))
        deltas = loose.deltas.copied()
        mx.eval(deltas.arrays())
        return Record(loose.begin, loose.end, tuple(parts), loose.checkpoint, deltas, self.name)

    def saves(self, record: Record) -> int:
        """Bytes that letting go of a record's pages would free: less than nothing where running rows hold them too. A
        page that another record holds counts: that one can let go of it as well. What is encoded already need not hold
        any, not even those that a row holds: it only pays for them."""
        if record.encoded is not None:
            return sum(part.nbytes for part in record.parts) - sum(part.without_pages().nbytes for part in record.parts)
        return sum(part.idle_bytes for part in record.parts) - self._encoded_bytes(record)

    def least(self, record: Record) -> int:
        """Bytes that a record takes without pages."""
        return self._encoded_bytes(record) + record.checkpoint_bytes

    def shrunk(self, record: Record) -> Record:
        """The same without the pages that nobody else holds. What was encoded before is not encoded again."""
        deltas = self._deltas(record)
        mx.eval(deltas.arrays())
        parts = tuple(part.without_pages() for part in record.parts)
        return replace(record, parts=parts, encoded=deltas, codec=self.name)

    def with_pages(self, records: Sequence[Record], length: int) -> list[Record]:
        """Records that a sequence can be put together from up to `length`: those without pages get new ones, where a
        token behind that sees them."""
        made: list[Record] = []
        for record in records:
            made.append(self._with_pages(record if record.end <= length else record.split(length)[0], made, length))
        mx.eval(self._rows.pending())
        return made

    def _with_pages(self, record: Record, before: Sequence[Record], length: int) -> Record:
        parts = list(record.parts)
        for group in self._rows.groups:
            part = parts[group.number]
            oldest = 0 if group.window is None else length - group.window + 1
            if not part.has_pages and part.end > oldest:
                assert record.encoded is not None
                parts[group.number] = self._part_with_pages(part, before, self._decoded(record.encoded, group))
        return replace(record, parts=tuple(parts))

    def _part_with_pages(self, part: KVPart, before: Sequence[Record], deltas: LayerDeltas) -> KVPart:
        """What it still has of its pages stays: others go on from inside of the last one, and count on it to pay."""
        group, held = part.group, part.table
        if group.window is not None or not held.numbers:
            return place_record_part(self._rows, group, before, deltas)
        made = place_record_part(self._rows, group, before, deltas.before(held.first * PAGE, part.begin))
        table = PageTable(group.pages, made.table.first, [*made.table.numbers, *held.numbers], kept=True)
        return replace(part, table=table, paid=min(made.paid, held.first))

    def _deltas(self, record: Record) -> LayerDeltas:
        return self._encoded(record) if record.encoded is None else record.encoded

    def _encoded(self, record: Record) -> LayerDeltas:
        """Of a record that has its pages."""
        return self._codec.encode(read_deltas(self._rows.states, record_extents(record), read_raw_delta))

    def _decoded(self, deltas: LayerDeltas, group: PageGroup) -> LayerDeltas:
        """In the layers of a group."""
        return self._codec.decode(deltas, layers_of_group(self._rows.states, group))

    def _encoded_bytes(self, record: Record) -> int:
        """What its keys and values take, or would."""
        if record.encoded is not None:
            return record.encoded_bytes
        tokens = ((part.end - part.begin, sizes) for part, sizes in zip(record.parts, self._sizes, strict=True))
        return sum(each + count * more for count, (each, more) in tokens if count)


def record_encoding_for(rows: BatchState, codec: PairCodec, form: RecordForm | None) -> RecordEncoding:
    """`form` is that of raw records, which a lossy codec has to know."""
    if not codec.lossy:
        return RecordEncoding(rows)
    assert form is not None
    return LossyEncoding(rows, codec, form)


def encode_form(codec: DeltaCodec, form: RecordForm) -> RecordForm:
    """What records look like in fewer bits."""
    sample = replace(form.sample, deltas=codec.encode(form.sample.deltas))
    mx.eval(sample.arrays())
    return replace(form, sample=sample, pages=(None,) * len(form.pages))


def check_codec_fits(codec: PairCodec, met: DeltaCodec) -> None:
    """Raises ConfigError where some layer's states cannot be encoded."""
    if (problem := met.problem) is not None:
        raise codec_refused_error(codec, problem)


def codec_refused_error(codec: PairCodec, problem: str) -> ConfigError:
    return ConfigError(f"cache_codec {codec.name} cannot be used: {problem}. Use cache_codec raw.", param="cache_codec")
