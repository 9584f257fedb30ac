"""What records are put into when they leave their pages, for files or for less memory, and how they come back.

Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ingot.cache.codecs.names import RAW
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.deltas import Deltas, KVDelta, arrays_of
from ingot.cache.groups import PageGroup
from ingot.cache.layers import AppendState
from ingot.cache.packing import Form, LooseRecord, as_stored, laid, laid_part, loosened
from ingot.cache.pages import Table
from ingot.cache.records import KVPart, Record
from ingot.cache.rows import Rows
from ingot.errors import ConfigError


class RecordEncoding:
    """What leaves its pages stays as it is, bit for bit: raw, or in the fewer bits that live pages are in."""

    lossy = False

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.name = RAW if rows.codec is None else str(rows.codec.name)
        """What records went through that it gives."""

    def form(self, form: Form) -> Form:
        """What records look like outside of pages, for one that has them raw."""
        return form

    def loose(self, record: Record) -> LooseRecord:
        """A record as it is written to files."""
        return as_stored(self._rows, record)

    def taken(self, before: Sequence[Record], loose: LooseRecord) -> Record:
        """A record that was read from one; `before` are those of the tokens before it."""
        return replace(laid(self._rows, before, loose), codec=self.name)


@dataclass(frozen=True, slots=True)
class LayerShape:
    heads: int
    sizes: tuple[int, int]
    dtype: mx.Dtype


class LossyEncoding(RecordEncoding):
    """Keys and values in fewer bits. Windows keep their place; checkpoints stay as they are."""

    lossy = True

    def __init__(self, rows: Rows, codec: PairCodec, form: Form) -> None:
        """`form` is that of raw records. Raises ConfigError where the model's states cannot be encoded."""
        super().__init__(rows)
        self._codec = codec
        self.name = str(codec.name)
        self._shapes = tuple(None if delta is None else _shape(delta) for delta in form.sample.deltas)
        if not any(self._shapes):
            raise _refused(self.name, "this model keeps no keys and values")
        for shape in self._shapes:
            if shape is not None and (problem := codec.problem(shape.sizes)) is not None:
                raise _refused(self.name, problem)
        self._sizes = tuple(map(self._group_sizes, rows.groups))

    def form(self, form: Form) -> Form:
        sample = replace(form.sample, deltas=self._encoded(form.sample.deltas))
        mx.eval(sample.arrays())
        return replace(form, sample=sample, pages=(None,) * len(form.pages))

    def loose(self, record: Record) -> LooseRecord:
        return LooseRecord(record.begin, record.end, self._deltas(record), record.checkpoint)

    def taken(self, before: Sequence[Record], loose: LooseRecord) -> Record:
        """Without pages: it gets some when a sequence goes on from it."""
        parts = []
        for group in self._rows.groups:
            begin, end = next(
                (delta.begin, delta.end)
                for delta, state in zip(loose.deltas, self._rows.states, strict=True)
                if delta is not None and isinstance(state, AppendState) and state.group is group
            )
            parts.append(KVPart(group, begin, end, Table(group.pages, kept=True), begin))
        deltas = tuple(None if delta is None else delta.copied() for delta in loose.deltas)
        mx.eval(arrays_of(deltas))
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
        mx.eval(arrays_of(deltas))
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
                deltas = (
                    self._decoded(delta, shape) if _is_of(state, part) else None
                    for delta, shape, state in zip(record.encoded, self._shapes, self._rows.states, strict=True)
                )
                parts[group.number] = laid_part(self._rows, group, before, tuple(deltas))
        return replace(record, parts=tuple(parts))

    def _deltas(self, record: Record) -> Deltas:
        if record.encoded is not None:
            return record.encoded
        return self._encoded(loosened(self._rows, record).deltas)

    def _encoded(self, deltas: Deltas) -> Deltas:
        return tuple(
            delta if delta is None or not delta.arrays else replace(delta, arrays=self._codec.encode(*delta.arrays))
            for delta in deltas
        )

    def _decoded(self, delta: KVDelta | None, shape: LayerShape | None) -> KVDelta:
        assert delta is not None and shape is not None
        return replace(delta, arrays=self._codec.decode(delta.arrays, shape.dtype))

    def _encoded_bytes(self, record: Record) -> int:
        """What its keys and values take, or would."""
        if record.encoded is not None:
            return record.encoded_bytes
        tokens = ((part.end - part.begin, sizes) for part, sizes in zip(record.parts, self._sizes, strict=True))
        return sum(each + count * more for count, (each, more) in tokens if count)

    def _group_sizes(self, group: PageGroup) -> tuple[int, int]:
        """Bytes in all layers of a group: of any tokens, and of each more."""
        shapes = [
            (shape.heads, shape.sizes, shape.dtype)
            for shape, state in zip(self._shapes, self._rows.states, strict=True)
            if shape is not None and isinstance(state, AppendState) and state.group is group
        ]
        none, one = (sum(self._codec.nbytes(count, *shape) for shape in shapes) for count in (0, 1))
        return none, one - none


def encoding_of(rows: Rows, codec: PairCodec, form: Form | None) -> RecordEncoding:
    """`form` is that of raw records, which a lossy codec has to know."""
    if not codec.lossy:
        return RecordEncoding(rows)
    assert form is not None
    return LossyEncoding(rows, codec, form)


def _is_of(state: object, part: KVPart) -> bool:
    return isinstance(state, AppendState) and state.group is part.group


def _shape(delta: KVDelta) -> LayerShape:
    keys, values = delta.arrays
    return LayerShape(keys.shape[1], (keys.shape[3], values.shape[3]), keys.dtype)


def _refused(name: str, problem: str) -> ConfigError:
    return ConfigError(f"cache_codec {name} cannot be used: {problem}. Use cache_codec raw.", param="cache_codec")
