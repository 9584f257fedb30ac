"""States outside of live ones that every rank has its part of: rank 0 knows them by numbers, and tells what becomes of
them. Only the engine thread may call anything here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ingot.cache.batch_state import Rows
from ingot.cache.checkpoint import Checkpoint
from ingot.cache.delta_codec import Size
from ingot.cache.deltas import Deltas
from ingot.cache.kv_deltas import layers_of
from ingot.distributed import control_channel
from ingot.ranks.voice import Voice


class ToldCheckpoint(Checkpoint):
    """One that every rank has its part of, for as long as somebody here holds it."""

    number: int
    size: int
    voice: Voice

    @property
    def nbytes(self) -> int:
        """On the rank where it takes most."""
        return self.size

    def __del__(self) -> None:
        self.voice.note(control_channel.Dropped(self.number))


class Piece:
    """What the others have of some record's keys and values, for as long as somebody here holds this."""

    __slots__ = ("number", "voice")

    def __init__(self, voice: Voice) -> None:
        self.number, self.voice = voice.number(), voice

    def __del__(self) -> None:
        self.voice.note(control_channel.Released(self.number))


@dataclass(frozen=True, slots=True)
class Sizing:
    """What keys and values in fewer bits take on the rank where they take most: by group, the number of one of its
    layers here, and bytes."""

    groups: Sequence[tuple[int, Size]]

    @classmethod
    def of(cls, rows: Rows, sizes: Iterable[Size]) -> Sizing:
        """Rank 0 has a layer of every group."""
        return cls([(min(layers_of(rows.states, group)), size) for group, size in zip(rows.groups, sizes, strict=True)])

    def nbytes(self, deltas: Deltas) -> int:
        found = ((deltas[layer], size) for layer, size in self.groups)
        extents = ((delta.end - delta.begin, size) for delta, size in found if delta is not None)
        return sum(any_tokens + tokens * each for tokens, (any_tokens, each) in extents if tokens)


class ToldDeltas(Deltas):
    """Rank 0's part of a piece, in whatever form. What is cut here is cut everywhere."""

    piece: Piece
    sizing: Sizing | None  # None: what it takes does not matter, as it goes into pages

    @classmethod
    def of(cls, deltas: Deltas, piece: Piece, sizing: Sizing | None) -> ToldDeltas:
        told = cls(deltas)
        told.piece, told.sizing = piece, sizing
        return told

    @property
    def nbytes(self) -> int:
        return super().nbytes if self.sizing is None else self.sizing.nbytes(self)

    def behind(self, begin: int, whole: int) -> ToldDeltas:
        return self._cut(super().behind(begin, whole), begin, None, whole)

    def before(self, end: int, whole: int) -> ToldDeltas:
        return self._cut(super().before(end, whole), None, end, whole)

    def copied(self) -> ToldDeltas:
        """The others' parts are always in memory of their own."""
        return ToldDeltas.of(super().copied(), self.piece, self.sizing)

    def _cut(self, deltas: Deltas, begin: int | None, end: int | None, whole: int) -> ToldDeltas:
        made = Piece(self.piece.voice)
        made.voice.note(control_channel.Cut(self.piece.number, made.number, begin, end, whole))
        return ToldDeltas.of(deltas, made, self.sizing)
