"""Every rank but 0: no scheduler, no prefixes, no sampling. Does to its share of the live states what it is told."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import msgspec

from ingot.cache.checkpoint import Checkpoint
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.forms import Forms, Slots
from ingot.cache.groups import PageGroup
from ingot.cache.launch import Launch, Part, Row
from ingot.cache.layer_state import LayerState
from ingot.cache.pages import PageCopy, Pages, Table
from ingot.cache.pools import Pool
from ingot.cache.rows import Rows
from ingot.config import Settings
from ingot.kernels import device, native
from ingot.models.adapter import Adapter
from ingot.models.forward import run
from ingot.models.live_states import live_states
from ingot.ranks import plan
from ingot.ranks.joining import join_group
from ingot.ranks.leader import pools_of, shared_tokens
from ingot.ranks.place import Place
from ingot.ranks.plan import Kind
from ingot.ranks.share import Share
from ingot.ranks.wire import Link, LinkLate, LinkLost

KEPT_SHARE: Final = 10
"""Percent of its memory that mlx may keep of what passes gave back."""
MOST_WORDS: Final = 2000
"""Characters of what went wrong."""
OnStep = Callable[[int], None]


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

    def __init__(self, layers: list[LayerState], windows: Sequence[plan.Window], codec: PairCodec | None) -> None:
        super().__init__(layers, codec=codec, windows=windows)
        self._pools = pools_of(self.groups)
        for group in self.groups:
            group.pages = Pages(None if group.coded is None else ToldForms())
        for pool in self._pools:
            pool.slots = ToldSlots()
        self._seated: dict[int, Row] = {}  # by slot
        self._checkpoints: dict[int, Checkpoint] = {}
        self._told: plan.Pass | None = None

    def hear(self, event: plan.Event) -> None:
        """Something happened, other than a pass."""
        match event:
            case plan.Resized(slots):
                self._resize(slots)
            case plan.Left(slot):
                self._seated.pop(slot, None)
            case plan.Taken(number, slot):
                copies = self.checkpoint(self._seat(slot))
                if copies is not None:
                    self._checkpoints[number] = copies
            case plan.Resumed(number, slot):
                if number in self._checkpoints:
                    self.resume(self._seat(slot), self._checkpoints[number])
            case plan.Dropped(number):
                self._checkpoints.pop(number, None)
            case plan.Rewound(slot, length):
                self.rewind(self._seat(slot), length)
            case plan.Trimmed(pools):
                for pool, (slabs, free) in zip(self._pools, pools, strict=True):
                    assert isinstance(pool.slots, ToldSlots)
                    pool.slots.let_go(array("i", free))
                    pool.keep(slabs)
            case plan.Laid(slabs, copies):
                self._grow(slabs)
                for number, told in copies:
                    self._copied(self.groups[number], told)
            case plan.Encoded(number, raw, coded):
                self.groups[number].encode_slots(array("i", raw), array("i", coded))

    def parts(self, told: plan.Pass) -> list[Part]:
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

    def _standing(self, told: plan.RowPlan) -> Row:
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


class Follower:
    """A share of a model, and whoever says what is done with it. Only one thread may call it."""

    def __init__(self, adapter: Adapter, group: Any) -> None:
        self._adapter, self._group = adapter, group
        self._rows: FollowingRows | None = None
        self._mixed = False
        self._running: list[mx.array] = []

    def hear(self, events: plan.Events) -> None:
        for event in events:
            if isinstance(event, plan.Begun):
                layers = live_states(
                    self._adapter.model, self._adapter.margin, self._adapter.kept, self._adapter.kernels
                )
                self._rows, self._mixed = FollowingRows(layers, event.windows, self._adapter.live), event.mixed
                continue
            assert self._rows is not None, "something happened before anything began"
            if isinstance(event, plan.Pass):
                self._pass(self._rows, event)
            else:
                self._rows.hear(event)

    def settle(self) -> None:
        """Wait for the pass under way."""
        mx.eval(self._running)
        self._running = []

    def _pass(self, rows: FollowingRows, told: plan.Pass) -> None:
        tokens = shared_tokens(mx.zeros(told.tokens, mx.uint32), self._group)
        mx.async_eval(tokens)
        adapter = self._adapter
        logits = run(adapter.model, adapter.selection, rows, tokens, rows.parts(told), told.at, mixed=self._mixed)
        self.settle()  # one pass ahead, and no more
        self._running = [logits, *rows.pending()]
        mx.async_eval(self._running)
        if adapter.device.kind == "cpu":
            self.settle()


def follow(settings: Settings, folder: Path, where: Place, on_step: OnStep) -> None:
    """Load this rank's share of the model in `folder`, and do what rank 0 says until it needs nobody any more. What
    goes wrong is the last that it hears. `on_step` is given 0 when it is loaded, then each pass's
    number."""
    joined = join_group(settings, where)
    [link] = joined.links
    try:
        here = device.current()
        native.use_one_path(settings.deterministic)
        total = joined.memory_budget(here, settings.memory)
        adapter = joined.load(folder, here, settings)
        device.bound_memory(here, total, KEPT_SHARE * total // 100)
        link.send(Kind.SHARE, msgspec.msgpack.encode(Share.of(adapter, total)))
        on_step(0)
        _obey(Follower(adapter, joined.sharing.group), link, on_step)
    except LinkLost:
        raise
    except Exception as error:
        with suppress(LinkLost, LinkLate):
            link.send(Kind.FAILED, f"rank {where.rank}: {error or type(error).__name__}"[:MOST_WORDS].encode())
        raise


def _obey(follower: Follower, link: Link, on_step: OnStep) -> None:
    while (frame := link.receive()).kind == Kind.TOLD:
        follower.hear(plan.decode(frame.body))
        on_step(frame.step)
    follower.settle()
