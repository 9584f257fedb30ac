"""Rank 0's batch state, which sends every change to the followers; and the checkpoints and pieces of records of which
every rank has its part, known by numbers. For the engine thread alone.
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
    """A checkpoint of which every rank has its part, for as long as this object lives."""

    number: int
    size: int
    channel: ControlChannel

    @property
    def nbytes(self) -> int:
        """On the rank where it is largest."""
        return self.size

    def __del__(self) -> None:
        self.channel.queue(control_channel.CheckpointDropped(self.number))


class SharedPiece:
    """The followers' parts of a record's KV, for as long as this object lives."""

    __slots__ = ("channel", "number")

    def __init__(self, channel: ControlChannel) -> None:
        self.number, self.channel = channel.number(), channel

    def __del__(self) -> None:
        self.channel.queue(control_channel.PieceReleased(self.number))


@dataclass(frozen=True, slots=True)
class EncodedSizing:
    """What quantised KV takes on the rank where it is largest: by group, the number of one of its layers here, and
    bytes."""

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
    """Rank 0's part of a piece, in any form. A cut is made on all ranks."""

    piece: SharedPiece
    sizing: EncodedSizing | None  # None: its size does not matter, as it goes into pages

    @classmethod
    def of(cls, deltas: LayerDeltas, piece: SharedPiece, sizing: EncodedSizing | None) -> SharedDeltas:
        shared = cls(deltas)
        shared.piece, shared.sizing = piece, sizing
        return shared

    @property
    def nbytes(self) -> int:
        return super().nbytes if self.sizing is None else self.sizing.nbytes(self)

    def behind(self, begin: int, whole: int) -> SharedDeltas:
        return self._cut(super().behind(begin, whole), begin, None, whole)

    def before(self, end: int, whole: int) -> SharedDeltas:
        return self._cut(super().before(end, whole), None, end, whole)

    def copied(self) -> SharedDeltas:
        """The followers' parts are copies already."""
        return SharedDeltas.of(super().copied(), self.piece, self.sizing)

    def _cut(self, deltas: LayerDeltas, begin: int | None, end: int | None, whole: int) -> SharedDeltas:
        made = SharedPiece(self.piece.channel)
        made.channel.queue(control_channel.PieceCut(self.piece.number, made.number, begin, end, whole))
        return SharedDeltas.of(deltas, made, self.sizing)


TablePlan = tuple[int, bytes, int]
"""Its first page, the slots of all, and how many of the first are quantised."""


class LeaderBatchState(BatchState):
    _has_spares = False  # slots are the rows' names between ranks

    def __init__(
        self,
        layers: list[LayerState],
        beside: Sequence[LayerState],
        footprint: Footprint,
        channel: ControlChannel,
        most: int | None,
        earlier: int,
        codec: PairCodec | None,
        *,
        mixed: bool,
    ) -> None:
        """See `BatchState`; `beside` are a draft head's layers, `footprint` is that of all ranks."""
        windows, sizes = [window for window, _ in footprint.groups], [size for _, size in footprint.groups]
        super().__init__(layers, most, sizes, beside, earlier, codec, footprint.coded, windows)
        self._recurrent_bytes, self._channel = footprint.recurrent, channel
        self._tables: dict[int, list[TablePlan]] = {}  # by slot, as last sent
        self._pools = numbered_pools(self.groups)
        self._slabs: list[list[int]] = [[] for _ in self._pools]
        self._copies: list[tuple[int, list[tuple[int, int, int, bool]]]] = []
        self._pass: tuple[mx.array, Sequence[int] | None] = (mx.zeros(0), None)  # its tokens, and where logits are
        self._earlier_states = 0
        channel.send(control_channel.BatchStateCreated(windows, mixed))
        channel.note_pages = self.note_pages

    @property
    def kinds(self) -> set[LayerKind]:
        """Of all ranks' layers."""
        return super().kinds | ({"recurrent"} if self._recurrent_bytes else set())

    def leave(self, row: Row) -> None:
        super().leave(row)
        self._tables.pop(row.slot, None)
        self._channel.queue(control_channel.RowRemoved(row.slot))

    def trim(self) -> bool:
        self.note_pages()  # before slots are freed that the last copies used
        trimmed = super().trim()
        if trimmed:
            self._slabs = [list(pool.slabs) for pool in self._pools]
            free = [(len(pool.slabs), array("i", pool.slots.free).tobytes()) for pool in self._pools]
            self._channel.send(control_channel.PoolsTrimmed(free))
        return trimmed

    def rewind(self, row: Row, length: int) -> int:
        now = super().rewind(row, length)
        self._channel.queue(control_channel.RowRewound(row.slot, length))
        return now

    def checkpoint(self, row: Row) -> StateCheckpoint | None:
        copies = super().checkpoint(row)
        if copies is None:
            return None
        shared = self.shared_checkpoint(copies)
        self._channel.queue(control_channel.CheckpointMade(shared.number, row.slot))
        return shared

    def shared_checkpoint(self, copies: StateCheckpoint) -> SharedCheckpoint:
        """With a new number, which the caller has to send."""
        shared = SharedCheckpoint(copies)
        shared.number, shared.size, shared.channel = self._channel.number(), self._recurrent_bytes, self._channel
        return shared

    def resume(self, row: Row, checkpoint: StateCheckpoint) -> None:
        assert isinstance(checkpoint, SharedCheckpoint), "a checkpoint that the followers do not have"
        super().resume(row, checkpoint)
        self._channel.queue(control_channel.CheckpointResumed(checkpoint.number, row.slot))

    @contextmanager
    def passing(self, tokens: mx.array, at: Sequence[int] | None) -> Iterator[None]:
        """While this is open, forward batches are sent as a pass over these tokens, which come by a collective."""
        self._pass = tokens, at
        with self._channel.computing():
            yield

    def _resize(self, slots: int) -> None:
        super()._resize(slots)
        self._channel.queue(control_channel.SlotsResized(slots))

    def _earlier(self, parts: Sequence[ForwardPart]) -> int:
        self._earlier_states = super()._earlier(parts)
        return self._earlier_states

    def _make_room(self, launches: Sequence[ForwardBatch]) -> None:
        super()._make_room(launches)
        self.note_pages()
        tokens, at = self._pass
        parts = [self._part(batch) for batch in launches]
        chosen = None if at is None else list(at)
        self._channel.send(control_channel.ForwardPass(parts, tokens.size, chosen, self._earlier_states))
        # No sooner: a collective that the followers do not know of would wait for ever.
        mx.async_eval(tokens)

    def note_pages(self) -> None:
        """Queue where there is memory for pages, and which were copied; to be called before any event about them."""
        grown, copies = self._grown(), self._copies
        if grown or copies:
            self._copies = []
            self._channel.queue(control_channel.PagesMoved(grown, copies))

    def copy(self, group: PageGroup, copies: Sequence[PageCopy]) -> None:
        super().copy(group, copies)
        if copies:
            self._copies.append((group.number, [*copies]))

    def _encode_pages(self, group: PageGroup, pages: Sequence[int]) -> None:
        self.note_pages()
        raw, coded = (array("i", slots).tobytes() for slots in group.both_slots(pages))
        self._channel.queue(control_channel.PagesEncoded(group.number, raw, coded))
        super()._encode_pages(group, pages)

    def lay(self, group: PageGroup, deltas: LayerDeltas, placement: KVPlacement) -> None:
        assert isinstance(deltas, SharedDeltas), "KV that the followers do not have"
        super().lay(group, deltas, placement)
        self.note_pages()
        coded, runs = array("i", placement.coded).tobytes(), list(placement.runs)
        self._channel.queue(control_channel.PiecePlaced(deltas.piece.number, group.number, coded, placement.held, runs))

    def _part(self, batch: ForwardBatch) -> control_channel.PartPlan:
        assert not batch.bidirectional, "a group of ranks takes no images"
        stated: Any = None if batch.stated is None else batch.stated.tolist()
        rows = zip(batch.rows, batch.starts, batch.positions, strict=True)
        plans = [control_channel.RowPlan(row.slot, start, at, self._changed(row)) for row, start, at in rows]
        return control_channel.PartPlan(plans, batch.width, batch.tentative, stated)

    def _changed(self, row: Row) -> list[tuple[int, int, bytes, int]]:
        before = self._tables.get(row.slot)
        tables = zip(self.groups, row.tables, strict=True)
        now = [(table.first, group.slots_as_read(table), table.coded) for group, table in tables]
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
    """In the order by which all ranks number pools."""
    return [pool for group in groups for pool in group.pools]
