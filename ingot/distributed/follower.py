"""Live states of a rank that follows: they change as they are told to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ingot.cache.batch_state import Rows
from ingot.cache.checkpoint import Checkpoint
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.forms import Forms, Slots
from ingot.cache.forward_batch import Launch, Part, Row
from ingot.cache.layer_state import LayerState
from ingot.cache.page_groups import PageGroup
from ingot.cache.pages import PageCopy, Pages, Table
from ingot.cache.pools import Pool
from ingot.distributed import control_channel
from ingot.distributed.leader_state import pools_of


class ToldSlots(Slots):
    """Rank 0 counts who has which; here is known what it said of those that nobody does."""

    def let_go(self, free: Sequence[int]) -> None:
        self._free = list(free)


class ToldForms(Forms):
    """Rows are told where their pages lie, so that any page lies at its own number."""

    def reach(self, slots: int) -> None:
        """There are so many, in some pool."""
        for places in (self.raw_of, self.coded_of):
            places.extend(range(len(places), slots))


class ToldTable(Table):
    """The pages of a row, as it was told. Whether they are anybody's is rank 0's to know."""

    def __init__(self, pages: Pages) -> None:
        super().__init__(pages)

    def release(self) -> None:
        self.numbers = array("i")

    def rewind(self, length: int) -> None:
        """What is left is told with the next pass."""

    def forget(self, oldest: int) -> None:
        """The same."""


class FollowingRows(Rows):
    """Live states that change as they are told to."""

    def __init__(
        self, layers: list[LayerState], windows: Sequence[control_channel.Window], codec: PairCodec | None
    ) -> None:
        super().__init__(layers, codec=codec, windows=windows)
        self._pools = pools_of(self.groups)
        for group in self.groups:
            group.pages = Pages(None if group.coded is None else ToldForms())
        for pool in self._pools:
            pool.slots = ToldSlots()
        self._seated: dict[int, Row] = {}  # by slot
        self._checkpoints: dict[int, Checkpoint] = {}
        self._told: control_channel.Pass | None = None

    def hear(self, event: control_channel.Event) -> None:
        """Something happened, other than a pass."""
        match event:
            case control_channel.Resized(slots):
                self._resize(slots)
            case control_channel.Left(slot):
                self._seated.pop(slot, None)
            case control_channel.Taken(number, slot):
                copies = self.checkpoint(self._seat(slot))
                if copies is not None:
                    self._checkpoints[number] = copies
            case control_channel.Resumed(number, slot):
                if number in self._checkpoints:
                    self.resume(self._seat(slot), self._checkpoints[number])
            case control_channel.Dropped(number):
                self._checkpoints.pop(number, None)
            case control_channel.Rewound(slot, length):
                self.rewind(self._seat(slot), length)
            case control_channel.Trimmed(pools):
                for pool, (slabs, free) in zip(self._pools, pools, strict=True):
                    assert isinstance(pool.slots, ToldSlots)
                    pool.slots.let_go(array("i", free))
                    pool.keep(slabs)
            case control_channel.Laid(slabs, copies):
                self._grow(slabs)
                for number, told in copies:
                    self._copied(self.groups[number], told)
            case control_channel.Encoded(number, raw, coded):
                self.groups[number].encode_slots(array("i", raw), array("i", coded))

    def recall(self, number: int, checkpoint: Checkpoint | None) -> None:
        """A checkpoint, which this rank may have nothing of, was read from a file."""
        if checkpoint is not None:
            self._checkpoints[number] = checkpoint

    def recalled(self, number: int | None) -> Checkpoint | None:
        """What this rank has of a checkpoint."""
        return None if number is None else self._checkpoints.get(number)

    def parts(self, told: control_channel.Pass) -> list[Part]:
        """Of a pass, which is launched next."""
        self._told = told
        return [
            Part(
                tuple(self._standing(row) for row in part.rows),
                part.width,
                None if part.stated is None else mx.array(part.stated),
                tentative=part.tentative,
            )
            for part in told.parts
        ]

    def provide(self, pool: Pool[Any]) -> None:
        """What there is memory for is told."""

    def _standing(self, told: control_channel.RowPlan) -> Row:
        row = self._seat(told.slot)
        row.length, row.position = told.length, told.position
        for number, first, slots, coded in told.tables:
            table = row.tables[number]
            table.first, table.numbers, table.coded = first, array("i", slots), coded
        return row

    def _seat(self, slot: int) -> Row:
        if slot not in self._seated:
            self._seated[slot] = Row(slot, tuple(ToldTable(group.pages) for group in self.groups))
        return self._seated[slot]

    def _earlier(self, parts: Sequence[Part]) -> int:
        assert self._told is not None
        return self._told.earlier

    def _make_room(self, launches: Sequence[Launch]) -> None:
        """It is there: what it takes is told before a pass is."""

    def _encode(self, launches: Sequence[Launch]) -> None:
        """What is due was told before the pass."""

    def _grow(self, slabs: Sequence[tuple[int, Sequence[int]]]) -> None:
        for number, pages in slabs:
            self._pools[number].grow_like(pages)
        for group in self.groups:
            if isinstance(group.pages.forms, ToldForms):
                group.pages.forms.reach(max(sum(pool.slabs) for pool in group.pools))

    def _copied(self, group: PageGroup, copies: Sequence[tuple[int, int, int, bool]]) -> None:
        if group.storages:
            group.copy([PageCopy(*copy) for copy in copies])
