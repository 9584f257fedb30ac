"""Kept records of a model that several ranks have: rank 0 says what becomes of them, and each rank has its part."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.delta_codec import Size
from ingot.cache.deltas import Deltas
from ingot.cache.disk.record_file import StoredData
from ingot.cache.packing import Form, LooseRecord, extents
from ingot.cache.page_groups import PageGroup
from ingot.cache.record_encoding import LossyEncoding, RecordEncoding
from ingot.cache.records import Record
from ingot.distributed import control_channel
from ingot.distributed.leader_state import LeadingRows
from ingot.ranks.pieces import Piece, Sizing, ToldDeltas
from ingot.ranks.voice import Voice


@dataclass(frozen=True, slots=True)
class ToldData(StoredData):
    """Rank 0's part of what every rank has read of a record."""

    piece: Piece


class PlainLeadingEncoding(RecordEncoding):
    """What leaves its pages for files does so on every rank, and comes back so."""

    def __init__(self, rows: LeadingRows, voice: Voice) -> None:
        super().__init__(rows)
        self._leading, self._voice = rows, voice

    def loose(self, record: Record) -> LooseRecord:
        piece, loose = loosened(self._voice, record), super().loose(record)
        return replace(loose, deltas=ToldDeltas.of(loose.deltas, piece, None))

    def opened(self, found: StoredData, form: Form) -> LooseRecord:
        return _recalled(self._leading, self._voice, found, super().opened(found, form), None)


class LeadingEncoding(LossyEncoding):
    """What is encoded, cut or put back into pages here is so on every rank. A record takes what it takes where that is
    most."""

    def __init__(
        self, rows: LeadingRows, codec: PairCodec, form: Form, voice: Voice, sizes: Mapping[int | None, Size]
    ) -> None:
        """`sizes` are those of all ranks, by window."""
        super().__init__(rows, codec, form)
        others = (sizes.get(group.window, (0, 0)) for group in rows.groups)
        both = zip(self._sizes, others, strict=True)
        self._sizes = tuple((max(own[0], most[0]), max(own[1], most[1])) for own, most in both)
        self._leading, self._voice, self._sizing = rows, voice, Sizing.of(rows, self._sizes)

    def opened(self, found: StoredData, form: Form) -> LooseRecord:
        return _recalled(self._leading, self._voice, found, super().opened(found, form), self._sizing)

    def _encoded(self, record: Record) -> Deltas:
        piece = loosened(self._voice, record)
        return ToldDeltas.of(super()._encoded(record), piece, self._sizing)

    def _decoded(self, deltas: Deltas, group: PageGroup) -> Deltas:
        assert isinstance(deltas, ToldDeltas)
        return ToldDeltas.of(super()._decoded(deltas, group), deltas.piece, self._sizing)


def loosened(voice: Voice, record: Record) -> Piece:
    """What a record that has its pages is outside of them, everywhere."""
    piece = Piece(voice)
    places = [(extent.begin, extent.end, array("i", extent.places).tobytes()) for extent in extents(record)]
    voice.note_pages()
    voice.note(control_channel.Loosened(piece.number, places))
    return piece


def _recalled(
    rows: LeadingRows, voice: Voice, found: StoredData, loose: LooseRecord, sizing: Sizing | None
) -> LooseRecord:
    """What was read here, as everybody's."""
    assert isinstance(found, ToldData), "a file that the other ranks have not read"
    deltas, checkpoint = ToldDeltas.of(loose.deltas, found.piece, sizing), loose.checkpoint
    if checkpoint is not None:
        told = checkpoint = rows.told_checkpoint(checkpoint)
        voice.note(control_channel.Recalled(found.piece.number, told.number))
    return replace(loose, deltas=deltas, checkpoint=checkpoint)
