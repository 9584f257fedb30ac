"""Rank 0's live states, whose every change is told; and the states outside of live ones that every rank has its part
of, which rank 0 knows by numbers. Only the engine thread may call anything here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ingot.cache.batch_state import BatchState
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import Footprint
from ingot.cache.forward_batch import ForwardBatch, ForwardPart, Row
from ingot.cache.kv_deltas import EncodedSize, KVPlacement, LayerDeltas, StateCheckpoint, layers_of_group
from ingot.cache.layer_state import LayerKind, LayerState
from ingot.cache.page_groups import PageGroup, PagePool
from ingot.cache.pages import PageCopy
from ingot.distributed import control_channel
from ingot.distributed.control_channel import ControlChannel


class SharedCheckpoint(StateCheckpoint):
    """One that every rank has its part of, for as long as somebody here holds it."""

    number: int
    size: int
    voice: ControlChannel

    @property
    def nbytes(self) -> int:
        """On the rank where it takes most."""
        return self.size

    def __del__(self) -> None:
        self.voice.note(control_channel.CheckpointDropped(self.number))


class SharedPiece:
    """What the others have of some record's keys and values, for as long as somebody here holds this."""

    __slots__ = ("number", "voice")

    def __init__(self, voice: ControlChannel) -> None:
        self.number, self.voice = voice.number(), voice

    def __del__(self) -> None:
        self.voice.note(control_channel.PieceReleased(self.number))


@dataclass(frozen=True, slots=True)
class EncodedSizing:
    """What keys and values in fewer bits take on the rank where they take most: by group, the number of one of its
    layers here, and bytes."""

    groups: Sequence[tuple[int, EncodedSize]]

    @classmethod
    def of(cls, rows: BatchState, sizes: Iterable[EncodedSize]) -> EncodedSizing:
        """Rank 0 has a layer of every group."""
        return cls(
            [(min(layers_of_group(rows.states, group)), size) for group, size in zip(rows.groups, sizes, strict=True)]
        )

    def nbytes(self, deltas: LayerDeltas) -> int:
        found = ((deltas[layer], size) for layer, size in self.groups)
        extents = ((delta.end - delta.begin, size) for delta, size in found if delta is not None)
        return sum(any_tokens + tokens * each for tokens, (any_tokens, each) in extents if tokens)


class SharedDeltas(LayerDeltas):
    """Rank 0's part of a piece, in whatever form. What is cut here is cut everywhere."""

    piece: SharedPiece
    sizing: EncodedSizing | None  # None: what it takes does not matter, as it goes into pages

    @classmethod
    def of(cls, deltas: LayerDeltas, piece: SharedPiece, sizing: EncodedSizing | None) -> SharedDeltas:
        told = cls(deltas)
        told.piece, told.sizing = piece, sizing
        return told

    @property
    def nbytes(self) -> int:
        return super().nbytes if self.sizing is None else self.sizing.nbytes(self)

    def behind(self, begin: int, whole: int) -> SharedDeltas:
        return self._cut(super().behind(begin, whole), begin, None, whole)

    def before(self, end: int, whole: int) -> SharedDeltas:
        return self._cut(super().before(end, whole), None, end, whole)

    def copied(self) -> SharedDeltas:
        """The others' parts are always in memory of their own."""
        return SharedDeltas.of(super().copied(), self.piece, self.sizing)

    def _cut(self, deltas: LayerDeltas, begin: int | None, end: int | None, whole: int) -> SharedDeltas:
        made = SharedPiece(self.piece.voice)
        made.voice.note(control_channel.PieceCut(self.piece.number, made.number, begin, end, whole))
        return SharedDeltas.of(deltas, made, self.sizing)


TablePlan = tuple[int, bytes, int]
"""Its first page, the slots of all, how many of the first are in fewer bits."""


class LeaderBatchState(BatchState):
    """Live states whose every change is told."""

    def __init__(
        self,
        layers: list[LayerState],
        beside: Sequence[LayerState],
        footprint: Footprint,
        voice: ControlChannel,
        most: int | None,
        earlier: int,
        codec: PairCodec | None,
        *,
        mixed: bool,
    ) -> None:
        """See `BatchState`. The `footprint` is that of all ranks."""
        windows, sizes = [window for window, _ in footprint.groups], [size for _, size in footprint.groups]
        super().__init__(layers, most, sizes, beside, earlier, codec, footprint.coded, windows)
        self._recurrent_bytes, self._control_channel = footprint.recurrent, voice
        self._tables: dict[int, list[TablePlan]] = {}  # by slot, as they were told last
        self._pools = numbered_pools(self.groups)
        self._slabs: list[list[int]] = [[] for _ in self._pools]
        self._copies: list[tuple[int, list[tuple[int, int, int, bool]]]] = []
        self._asked: tuple[mx.array, Sequence[int] | None] = (mx.zeros(0), None)
        self._wanted = 0
        voice.tell(control_channel.StatesBegun(windows, mixed))
        voice.note_pages = self.note_pages

    @property
    def kinds(self) -> set[LayerKind]:
        """Of all ranks' layers."""
        return super().kinds | ({"recurrent"} if self._recurrent_bytes else set())

    def leave(self, row: Row) -> None:
        super().leave(row)
        self._tables.pop(row.slot, None)
        self._control_channel.note(control_channel.RowLeft(row.slot))

    def trim(self) -> bool:
        self.note_pages()  # what goes on from kept prefixes may lie where something was copied last
        trimmed = super().trim()
        if trimmed:
            self._slabs = [list(pool.slabs) for pool in self._pools]
            free = [(len(pool.slabs), array("i", pool.slots.free).tobytes()) for pool in self._pools]
            self._control_channel.tell(control_channel.PoolsTrimmed(free))
        return trimmed

    def rewind(self, row: Row, length: int) -> int:
        now = super().rewind(row, length)
        self._control_channel.note(control_channel.RowRewound(row.slot, length))
        return now

    def checkpoint(self, row: Row) -> StateCheckpoint | None:
        copies = super().checkpoint(row)
        if copies is None:
            return None
        told = self.shared_checkpoint(copies)
        self._control_channel.note(control_channel.CheckpointTaken(told.number, row.slot))
        return told

    def shared_checkpoint(self, copies: StateCheckpoint) -> SharedCheckpoint:
        """With a number that the caller has told."""
        told = SharedCheckpoint(copies)
        told.number, told.size, told.voice = (
            self._control_channel.number(),
            self._recurrent_bytes,
            self._control_channel,
        )
        return told

    def resume(self, row: Row, checkpoint: StateCheckpoint) -> None:
        assert isinstance(checkpoint, SharedCheckpoint), "a checkpoint that the other ranks do not know"
        super().resume(row, checkpoint)
        self._control_channel.note(control_channel.CheckpointResumed(checkpoint.number, row.slot))

    @contextmanager
    def passing(self, tokens: mx.array, at: Sequence[int] | None) -> Iterator[None]:
        """While this is open, a launch is told as a forward pass over these tokens, which come by a collective."""
        self._asked = tokens, at
        with self._control_channel.computing():
            yield

    def _resize(self, slots: int) -> None:
        super()._resize(slots)
        self._control_channel.note(control_channel.SlotsResized(slots))

    def _earlier(self, parts: Sequence[ForwardPart]) -> int:
        self._wanted = super()._earlier(parts)
        return self._wanted

    def _make_room(self, launches: Sequence[ForwardBatch]) -> None:
        super()._make_room(launches)
        self.note_pages()
        tokens, at = self._asked
        parts = [self._part(launch) for launch in launches]
        chosen = None if at is None else list(at)
        self._control_channel.tell(control_channel.ForwardPass(parts, tokens.size, chosen, self._wanted))
        # No sooner: whatever is computed here behind a collective that nobody else knows of would wait for ever.
        mx.async_eval(tokens)

    def note_pages(self) -> None:
        """Have it told where there is memory for pages, and what was copied: whatever is told of them comes then."""
        grown, copies = self._grown(), self._copies
        if grown or copies:
            self._copies = []
            self._control_channel.note(control_channel.PagesMoved(grown, copies))

    def copy(self, group: PageGroup, copies: Sequence[PageCopy]) -> None:
        super().copy(group, copies)
        if copies:
            self._copies.append((group.number, [*copies]))

    def _encode_pages(self, group: PageGroup, pages: Sequence[int]) -> None:
        self.note_pages()
        raw, coded = (array("i", slots).tobytes() for slots in group.both_slots(pages))
        self._control_channel.note(control_channel.PagesEncoded(group.number, raw, coded))
        super()._encode_pages(group, pages)

    def lay(self, group: PageGroup, deltas: LayerDeltas, placement: KVPlacement) -> None:
        assert isinstance(deltas, SharedDeltas), "states that the other ranks do not know"
        super().lay(group, deltas, placement)
        self.note_pages()
        coded, runs = array("i", placement.coded).tobytes(), list(placement.runs)
        self._control_channel.note(
            control_channel.PiecePlaced(deltas.piece.number, group.number, coded, placement.held, runs)
        )

    def _part(self, launch: ForwardBatch) -> control_channel.PartPlan:
        assert not launch.bidirectional, "ranks are shown no pictures"
        stated: Any = None if launch.stated is None else launch.stated.tolist()
        rows = zip(launch.rows, launch.starts, launch.positions, strict=True)
        told = [control_channel.RowPlan(row.slot, start, position, self._changed(row)) for row, start, position in rows]
        return control_channel.PartPlan(told, launch.width, launch.tentative, stated)

    def _changed(self, row: Row) -> list[tuple[int, int, bytes, int]]:
        before = self._tables.get(row.slot)
        tables = zip(self.groups, row.tables, strict=True)
        now = [(table.first, group.seen_slots(table), table.coded) for group, table in tables]
        self._tables[row.slot] = now
        return [(number, *table) for number, table in enumerate(now) if before is None or before[number] != table]

    def _grown(self) -> list[tuple[int, list[int]]]:
        grown = [
            (number, list(pool.slabs)) for number, pool in enumerate(self._pools) if pool.slabs != self._slabs[number]
        ]
        for number, slabs in grown:
            self._slabs[number] = slabs
        return grown


def numbered_pools(groups: Sequence[PageGroup]) -> list[PagePool[Any]]:
    """In the order by which all ranks number them."""
    return [pool for group in groups for pool in group.pools]
