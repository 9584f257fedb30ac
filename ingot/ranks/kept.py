"""Kept records of a model that several ranks have: rank 0 says what becomes of them, and each rank has its part."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ingot.cache.codecs.pair import PairCodec
from ingot.cache.delta_codec import Size
from ingot.cache.deltas import Deltas
from ingot.cache.encoding import LossyEncoding
from ingot.cache.groups import PageGroup
from ingot.cache.packing import Form, extents
from ingot.cache.records import Record
from ingot.ranks import plan
from ingot.ranks.pieces import Piece, Sizing, ToldDeltas
from ingot.ranks.voice import Voice

if TYPE_CHECKING:
    from ingot.ranks.leader import LeadingRows


class LeadingEncoding(LossyEncoding):
    """What is encoded, cut or put back into pages here is so on every rank. A record takes what it takes where that is
    most."""

    _rows: LeadingRows

    def __init__(
        self, rows: LeadingRows, codec: PairCodec, form: Form, voice: Voice, sizes: Mapping[int | None, Size]
    ) -> None:
        """`sizes` are those of all ranks, by window."""
        super().__init__(rows, codec, form)
        others = (sizes.get(group.window, (0, 0)) for group in rows.groups)
        both = zip(self._sizes, others, strict=True)
        self._sizes = tuple((max(own[0], most[0]), max(own[1], most[1])) for own, most in both)
        self._voice, self._sizing = voice, Sizing.of(rows, self._sizes)

    def _encoded(self, record: Record) -> Deltas:
        piece = Piece(self._voice)
        self._rows.note_pages()
        self._voice.note(plan.Condensed(piece.number, told_extents(record)))
        return ToldDeltas.of(super()._encoded(record), piece, self._sizing)

    def _decoded(self, deltas: Deltas, group: PageGroup) -> Deltas:
        assert isinstance(deltas, ToldDeltas)
        return ToldDeltas.of(super()._decoded(deltas, group), deltas.piece, self._sizing)


def told_extents(record: Record) -> list[tuple[int, int, bytes]]:
    """Where a record lies that has its pages, as it is told."""
    return [(extent.begin, extent.end, array("i", extent.places).tobytes()) for extent in extents(record)]
