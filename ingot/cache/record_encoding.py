"""How records are encoded when they leave their pages, for files or to save memory, and how they are restored.

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
    """Records stay as they are, bit for bit: raw, or coded like live pages."""

    lossy = False

    def __init__(self, rows: BatchState) -> None:
        self._rows = rows
        self.name = RAW if rows.codec is None else str(rows.codec.name)
        """The codec that restored records went through."""

    def form(self, form: RecordForm) -> RecordForm:
        """The layout of encoded records, from that of raw ones."""
        return form

    def loose(self, record: Record) -> UnpagedRecord:
        """A record as it is written to a file."""
        return unpage_record_as_stored(self._rows, record)

    def opened(self, found: StoredData, form: RecordForm) -> UnpagedRecord:
        """A record that was read from a file. Raises ArchiveError unless it has this layout."""
        return fit_record(deserialise_record(found.header.record, found.tensors), form)

    def taken(self, before: Sequence[Record], loose: UnpagedRecord) -> Record:
        """Restore a record that was read; `before` are those of the tokens before it."""
        return replace(place_record(self._rows, before, loose), codec=self.name)


class LossyEncoding(RecordEncoding):
    """Keys and values are encoded. Checkpoints stay as they are."""

    lossy = True

    def __init__(self, rows: BatchState, codec: PairCodec, form: RecordForm) -> None:
        """`form` is that of raw records. Raises ConfigError where the model's keys and values cannot be encoded."""
        super().__init__(rows)
        self.name = str(codec.name)
        self._codec = DeltaCodec(codec, form.sample.deltas)
        if self._codec.is_idle:
            raise codec_refused_error(codec, "this model has no keys and values")
        check_codec_fits(codec, self._codec)
        sizes = self._codec.sizes(rows.states)
        self._sizes = tuple(sizes.get(group.window, (0, 0)) for group in rows.groups)

    def form(self, form: RecordForm) -> RecordForm:
        return encode_form(self._codec, form)

    def loose(self, record: Record) -> UnpagedRecord:
        return UnpagedRecord(record.begin, record.end, self._deltas(record), record.checkpoint)

    def taken(self, before: Sequence[Record], loose: UnpagedRecord) -> Record:
        """Without pages, which it gets when a sequence resumes from it."""
        parts = []
        for group in self._rows.groups:
            delta, _ = deltas_of_group(self._rows.states, group, loose.deltas)[0]
            parts.append(KVPart(group, delta.begin, delta.end, PageTable(group.pages, cached=True), delta.begin))
        deltas = loose.deltas.copied()
        mx.eval(deltas.arrays())
        return Record(loose.begin, loose.end, tuple(parts), loose.checkpoint, deltas, self.name)

    def saves(self, record: Record) -> int:
        """Bytes that releasing a record's pages would free; negative where running rows hold them too. A page that
        another record holds counts, since that one can release it as well. An encoded record needs no pages, not even
        those that a row holds: it is only charged for them."""
        if record.encoded is not None:
            return sum(part.nbytes for part in record.parts) - sum(part.without_pages().nbytes for part in record.parts)
        return sum(part.idle_bytes for part in record.parts) - self._encoded_bytes(record)

    def least(self, record: Record) -> int:
        """Bytes of a record without pages."""
        return self._encoded_bytes(record) + record.checkpoint_bytes

    def shrunk(self, record: Record) -> Record:
        """The same without the pages that no one else holds. What is encoded already is not encoded again."""
        deltas = self._deltas(record)
        mx.eval(deltas.arrays())
        parts = tuple(part.without_pages() for part in record.parts)
        return replace(record, parts=parts, encoded=deltas, codec=self.name)

    def with_pages(self, records: Sequence[Record], length: int) -> list[Record]:
        """Records from which a row can be restored up to `length`: those without pages get new ones, where a later
        token sees them."""
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
        """The page that it still has stays: others continue from within it, and this part is charged for it."""
        group, left = part.group, part.table
        if group.window is not None or not left.numbers:
            return place_record_part(self._rows, group, before, deltas)
        made = place_record_part(self._rows, group, before, deltas.before(left.first * PAGE, part.begin))
        table = PageTable(group.pages, made.table.first, [*made.table.numbers, *left.numbers], cached=True)
        return replace(part, table=table, charged_from=min(made.charged_from, left.first))

    def _deltas(self, record: Record) -> LayerDeltas:
        return self._encoded(record) if record.encoded is None else record.encoded

    def _encoded(self, record: Record) -> LayerDeltas:
        """Of a record that has its pages."""
        return self._codec.encode(read_deltas(self._rows.states, record_extents(record), read_raw_delta))

    def _decoded(self, deltas: LayerDeltas, group: PageGroup) -> LayerDeltas:
        """In the layers of a group."""
        return self._codec.decode(deltas, layers_of_group(self._rows.states, group))

    def _encoded_bytes(self, record: Record) -> int:
        """The size of its encoded keys and values, computed or predicted."""
        if record.encoded is not None:
            return record.encoded_bytes
        tokens = ((part.end - part.begin, sizes) for part, sizes in zip(record.parts, self._sizes, strict=True))
        return sum(each + count * more for count, (each, more) in tokens if count)


def record_encoding_for(rows: BatchState, codec: PairCodec, form: RecordForm | None) -> RecordEncoding:
    """`form` is that of raw records, which a lossy codec needs."""
    if not codec.lossy:
        return RecordEncoding(rows)
    assert form is not None
    return LossyEncoding(rows, codec, form)


def encode_form(codec: DeltaCodec, form: RecordForm) -> RecordForm:
    """The layout of encoded records."""
    sample = replace(form.sample, deltas=codec.encode(form.sample.deltas))
    mx.eval(sample.arrays())
    return replace(form, sample=sample, pages=(None,) * len(form.pages))


def check_codec_fits(codec: PairCodec, deltas: DeltaCodec) -> None:
    """Raises ConfigError where some layer's keys and values cannot be encoded."""
    if (problem := deltas.problem) is not None:
        raise codec_refused_error(codec, problem)


def codec_refused_error(codec: PairCodec, problem: str) -> ConfigError:
    return ConfigError(f"cache_codec {codec.name} cannot be used: {problem}. Use cache_codec raw.", param="cache_codec")
