"""What a rank that follows has of records outside of pages: made, cut and put back as it is told."""

from __future__ import annotations

from array import array

import mlx.core as mx

from ingot.cache.delta_codec import DeltaCodec
from ingot.cache.deltas import Deltas
from ingot.cache.extents import Berth, Extent, layers_of, raw_delta, read
from ingot.cache.rows import Rows
from ingot.ranks import plan


class FollowingPieces:
    """Of live states that begin anew when these do. Whoever calls has the pass under way computed first."""

    def __init__(self, rows: Rows, codec: DeltaCodec) -> None:
        self._rows, self._codec = rows, codec
        self._held: dict[int, Deltas] = {}

    def hear(self, event: plan.PieceEvent) -> None:
        match event:
            case plan.Condensed(number, extents):
                raw = read(self._rows.states, [_extent(*each) for each in extents], raw_delta)
                self._keep(number, self._codec.encode(raw))
            case plan.Cut(number, made, begin, end, whole):
                piece = self._held[number]
                piece = piece if end is None else piece.before(end, whole)
                piece = piece if begin is None else piece.behind(begin, whole)
                self._keep(made, piece.copied())
            case plan.Released(number):
                self._held.pop(number, None)
            case plan.Placed(number, place, coded, held, runs):
                group = self._rows.groups[place]
                raw = self._codec.decode(self._held[number], layers_of(self._rows.states, group))
                self._rows.lay(group, raw, Berth(array("i", coded), held, runs))
                mx.eval(self._rows.pending())

    def _keep(self, number: int, piece: Deltas) -> None:
        mx.eval(piece.arrays())
        self._held[number] = piece


def _extent(begin: int, end: int, places: bytes) -> Extent:
    return Extent(begin, end, array("i", places))
