"""Rank 0's live states: rows like any others, whose every change is told."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ingot.cache.batch_state import Rows
from ingot.cache.checkpoint import Checkpoint
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.deltas import Deltas
from ingot.cache.footprint import Footprint
from ingot.cache.forward_batch import Launch, Part, Row
from ingot.cache.kv_deltas import Berth
from ingot.cache.layer_state import LayerKind, LayerState
from ingot.cache.page_groups import PageGroup
from ingot.cache.pages import PageCopy
from ingot.cache.pools import Pool
from ingot.distributed import control_channel
from ingot.ranks.pieces import ToldCheckpoint, ToldDeltas
from ingot.ranks.voice import Voice

Table = tuple[int, bytes, int]
"""Its first page, the slots of all, how many of the first are in fewer bits."""


class LeadingRows(Rows):
    """Live states whose every change is told."""

    def __init__(
        self,
        layers: list[LayerState],
        beside: Sequence[LayerState],
        footprint: Footprint,
        voice: Voice,
        most: int | None,
        earlier: int,
        codec: PairCodec | None,
        *,
        mixed: bool,
    ) -> None:
        """See `Rows`. The `footprint` is that of all ranks."""
        windows, sizes = [window for window, _ in footprint.groups], [size for _, size in footprint.groups]
        super().__init__(layers, most, sizes, beside, earlier, codec, footprint.coded, windows)
        self._recurrent_bytes, self._voice = footprint.recurrent, voice
        self._tables: dict[int, list[Table]] = {}  # by slot, as they were told last
        self._pools = pools_of(self.groups)
        self._slabs: list[list[int]] = [[] for _ in self._pools]
        self._copies: list[tuple[int, list[tuple[int, int, int, bool]]]] = []
        self._asked: tuple[mx.array, Sequence[int] | None] = (mx.zeros(0), None)
        self._wanted = 0
        voice.tell(control_channel.Begun(windows, mixed))
        voice.note_pages = self.note_pages

    @property
    def kinds(self) -> set[LayerKind]:
        """Of all ranks' layers."""
        return super().kinds | ({"recurrent"} if self._recurrent_bytes else set())

    def leave(self, row: Row) -> None:
        super().leave(row)
        self._tables.pop(row.slot, None)
        self._voice.note(control_channel.Left(row.slot))

    def trim(self) -> bool:
        self.note_pages()  # what goes on from kept prefixes may lie where something was copied last
        trimmed = super().trim()
        if trimmed:
            self._slabs = [list(pool.slabs) for pool in self._pools]
            free = [(len(pool.slabs), array("i", pool.slots.free).tobytes()) for pool in self._pools]
            self._voice.tell(control_channel.Trimmed(free))
        return trimmed

    def rewind(self, row: Row, length: int) -> int:
        now = super().rewind(row, length)
        self._voice.note(control_channel.Rewound(row.slot, length))
        return now

    def checkpoint(self, row: Row) -> Checkpoint | None:
        copies = super().checkpoint(row)
        if copies is None:
            return None
        told = self.told_checkpoint(copies)
        self._voice.note(control_channel.Taken(told.number, row.slot))
        return told

    def told_checkpoint(self, copies: Checkpoint) -> ToldCheckpoint:
        """With a number that the caller has told."""
        told = ToldCheckpoint(copies)
        told.number, told.size, told.voice = self._voice.number(), self._recurrent_bytes, self._voice
        return told

    def resume(self, row: Row, checkpoint: Checkpoint) -> None:
        assert isinstance(checkpoint, ToldCheckpoint), "a checkpoint that the other ranks do not know"
        super().resume(row, checkpoint)
        self._voice.note(control_channel.Resumed(checkpoint.number, row.slot))

    @contextmanager
    def passing(self, tokens: mx.array, at: Sequence[int] | None) -> Iterator[None]:
        """While this is open, a launch is told as a forward pass over these tokens, which come by a collective."""
        self._asked = tokens, at
        with self._voice.computing():
            yield

    def _resize(self, slots: int) -> None:
        super()._resize(slots)
        self._voice.note(control_channel.Resized(slots))

    def _earlier(self, parts: Sequence[Part]) -> int:
        self._wanted = super()._earlier(parts)
        return self._wanted

    def _make_room(self, launches: Sequence[Launch]) -> None:
        super()._make_room(launches)
        self.note_pages()
        tokens, at = self._asked
        parts = [self._part(launch) for launch in launches]
        chosen = None if at is None else list(at)
        self._voice.tell(control_channel.Pass(parts, tokens.size, chosen, self._wanted))
        # No sooner: whatever is computed here behind a collective that nobody else knows of would wait for ever.
        mx.async_eval(tokens)

    def note_pages(self) -> None:
        """Have it told where there is memory for pages, and what was copied: whatever is told of them comes then."""
        grown, copies = self._grown(), self._copies
        if grown or copies:
            self._copies = []
            self._voice.note(control_channel.Laid(grown, copies))

    def copy(self, group: PageGroup, copies: Sequence[PageCopy]) -> None:
        super().copy(group, copies)
        if copies:
            self._copies.append((group.number, [*copies]))

    def _encode_pages(self, group: PageGroup, pages: Sequence[int]) -> None:
        self.note_pages()
        raw, coded = (array("i", slots).tobytes() for slots in group.both_slots(pages))
        self._voice.note(control_channel.Encoded(group.number, raw, coded))
        super()._encode_pages(group, pages)

    def lay(self, group: PageGroup, deltas: Deltas, berth: Berth) -> None:
        assert isinstance(deltas, ToldDeltas), "states that the other ranks do not know"
        super().lay(group, deltas, berth)
        self.note_pages()
        coded, runs = array("i", berth.coded).tobytes(), list(berth.runs)
        self._voice.note(control_channel.Placed(deltas.piece.number, group.number, coded, berth.held, runs))

    def _part(self, launch: Launch) -> control_channel.PartPlan:
        assert not launch.mutual, "ranks are shown no pictures"
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


def pools_of(groups: Sequence[PageGroup]) -> list[Pool[Any]]:
    """In the order by which all ranks number them."""
    return [pool for group in groups for pool in group.pools]
