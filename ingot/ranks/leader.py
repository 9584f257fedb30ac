"""Rank 0: an engine like any other, whose live states and forward passes are told to all ranks as they come.

Nothing above the adapter knows of it. What is told goes out before the pass is computed here, and whoever follows is
then as far as rank 0 is: at collectives, which make them wait for each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

import mlx.core as mx
import msgspec

from ingot.cache.checkpoint import Checkpoint
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import Footprint
from ingot.cache.groups import PageGroup
from ingot.cache.launch import Launch, Part, Row
from ingot.cache.layer_state import LayerKind, LayerState
from ingot.cache.pages import PageCopy
from ingot.cache.pools import Pool
from ingot.cache.rows import Rows
from ingot.errors import ModelError, Unavailable
from ingot.models.adapter import Adapter
from ingot.models.live_states import live_states
from ingot.ranks import plan
from ingot.ranks.plan import Kind
from ingot.ranks.share import Share, Whole
from ingot.ranks.wire import Link, LinkLate, LinkLost, broadcast

LOST = "The ranks of this model lost each other; they are started again"


Table = tuple[int, bytes, int]
"""Its first page, the slots of all, how many of the first are in fewer bits."""


class Voice:
    """Tells the followers, in order. Only the engine thread may call it."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._events: list[plan.Event] = []
        self._numbers = count()
        self.step = 0  # passes told
        self.trouble = ""  # why nothing can be told any more

    def number(self) -> int:
        """One that no checkpoint had before."""
        return next(self._numbers)

    def note(self, event: plan.Event) -> None:
        """Have it told with the next pass."""
        self._events.append(event)

    def tell(self, event: plan.Event) -> None:
        """Have it told now, and what was noted before it. Raises Unavailable where somebody is gone."""
        self._events.append(event)
        self._refuse_if_troubled()
        self.step += isinstance(event, plan.Pass)
        events, self._events = self._events, []
        try:
            broadcast(self._links, Kind.TOLD, plan.encode(events), self.step)
        except (LinkLost, LinkLate) as error:
            reason = self._reason() or error
            self.trouble = str(reason)
            raise reason from error

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What fails here after it was told leaves the others waiting for it: there is no going on."""
        self._refuse_if_troubled()
        try:
            yield
        except BaseException as error:
            self.trouble = self.trouble or f"{LOST}: {type(error).__name__}"
            raise

    def end(self) -> None:
        """Nobody is needed any more."""
        for link in self._links:
            with suppress(LinkLost, LinkLate):
                link.send(Kind.END)
            link.close()

    def _refuse_if_troubled(self) -> None:
        if self.trouble:
            raise Unavailable(LOST, retry_after=1)

    def _reason(self) -> Unavailable | None:
        """The last words of whoever is gone."""
        for link in self._links:
            try:
                frame = link.receive(0.0)
            except (LinkLost, LinkLate):
                continue
            if frame.kind == Kind.FAILED:
                return Unavailable(f"{LOST}: {frame.body.decode(errors='replace')}", retry_after=1)
        return None


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
        self.voice.note(plan.Dropped(self.number))


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
        voice.tell(plan.Begun(windows, mixed))

    @property
    def kinds(self) -> set[LayerKind]:
        """Of all ranks' layers."""
        return super().kinds | ({"recurrent"} if self._recurrent_bytes else set())

    def leave(self, row: Row) -> None:
        super().leave(row)
        self._tables.pop(row.slot, None)
        self._voice.note(plan.Left(row.slot))

    def trim(self) -> bool:
        self._note_pages()  # what goes on from kept prefixes may lie where something was copied last
        trimmed = super().trim()
        if trimmed:
            self._slabs = [list(pool.slabs) for pool in self._pools]
            free = [(len(pool.slabs), array("i", pool.slots.free).tobytes()) for pool in self._pools]
            self._voice.tell(plan.Trimmed(free))
        return trimmed

    def rewind(self, row: Row, length: int) -> int:
        now = super().rewind(row, length)
        self._voice.note(plan.Rewound(row.slot, length))
        return now

    def checkpoint(self, row: Row) -> Checkpoint | None:
        copies = super().checkpoint(row)
        if copies is None:
            return None
        told = ToldCheckpoint(copies)
        told.number, told.size, told.voice = self._voice.number(), self._recurrent_bytes, self._voice
        self._voice.note(plan.Taken(told.number, row.slot))
        return told

    def resume(self, row: Row, checkpoint: Checkpoint) -> None:
        assert isinstance(checkpoint, ToldCheckpoint), "a checkpoint that the other ranks do not know"
        super().resume(row, checkpoint)
        self._voice.note(plan.Resumed(checkpoint.number, row.slot))

    @contextmanager
    def passing(self, tokens: mx.array, at: Sequence[int] | None) -> Iterator[None]:
        """While this is open, a launch is told as a forward pass over these tokens, which come by a collective."""
        self._asked = tokens, at
        with self._voice.computing():
            yield

    def _resize(self, slots: int) -> None:
        super()._resize(slots)
        self._voice.note(plan.Resized(slots))

    def _earlier(self, parts: Sequence[Part]) -> int:
        self._wanted = super()._earlier(parts)
        return self._wanted

    def _make_room(self, launches: Sequence[Launch]) -> None:
        super()._make_room(launches)
        self._note_pages()
        tokens, at = self._asked
        parts = [self._part(launch) for launch in launches]
        chosen = None if at is None else list(at)
        self._voice.tell(plan.Pass(parts, tokens.size, chosen, self._wanted))
        # No sooner: whatever is computed here behind a collective that nobody else knows of would wait for ever.
        mx.async_eval(tokens)

    def _note_pages(self) -> None:
        grown, copies = self._grown(), self._copies
        if grown or copies:
            self._copies = []
            self._voice.note(plan.Laid(grown, copies))

    def _copy(self, group: PageGroup, copies: Sequence[PageCopy]) -> None:
        super()._copy(group, copies)
        if copies:
            self._copies.append((group.number, [*copies]))

    def _encode_pages(self, group: PageGroup, pages: Sequence[int]) -> None:
        self._note_pages()
        raw, coded = (array("i", slots).tobytes() for slots in group.both_slots(pages))
        self._voice.note(plan.Encoded(group.number, raw, coded))
        super()._encode_pages(group, pages)

    def _part(self, launch: Launch) -> plan.PartPlan:
        assert not launch.mutual, "ranks are shown no pictures"
        stated: Any = None if launch.stated is None else launch.stated.tolist()
        rows = zip(launch.rows, launch.starts, launch.positions, strict=True)
        told = [plan.RowPlan(row.slot, start, position, self._changed(row)) for row, start, position in rows]
        return plan.PartPlan(told, launch.width, launch.tentative, stated)

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


@dataclass(frozen=True)
class LeadingAdapter(Adapter):
    """The share of rank 0, which is asked as if it were all of the model. A head beside it is rank 0's alone: every
    rank has the hidden states that the last layer gives."""

    whole: Whole = field(kw_only=True)
    voice: Voice = field(kw_only=True)
    group: Any = field(kw_only=True)

    @property
    def is_whole(self) -> bool:
        return False

    @property
    def last_step(self) -> int:
        return self.voice.step

    @property
    def ranks_trouble(self) -> str:
        return self.voice.trouble

    def close(self) -> None:
        self.voice.end()

    def new_rows(self, most: int | None = None, earlier: int = 0) -> Rows:
        layers = live_states(self.model, self.margin, self.kept, self.kernels)
        beside = [] if self.head is None else live_states(self.head, 0, self.kept, self.kernels)
        return LeadingRows(layers, beside, self.footprint, self.voice, most, earlier, self.live, mixed=self.mixed)

    def run(
        self, rows: Rows, tokens: mx.array, parts: Sequence[Part], at: Sequence[int] | None = None, **asked: Any
    ) -> Any:
        assert isinstance(rows, LeadingRows)
        shared = shared_tokens(tokens, self.group)
        with rows.passing(shared, at):
            return super().run(rows, shared, parts, at, **asked)


def pools_of(groups: Sequence[PageGroup]) -> list[Pool[Any]]:
    """In the order by which all ranks number them."""
    return [pool for group in groups for pool in group.pools]


def shared_tokens(tokens: mx.array, group: Any) -> mx.array:
    """Those of rank 0, on every rank; the others bring zeros. The first collective of a pass, and to be evaluated as
    such, whatever else of it depends on them."""
    return mx.distributed.all_sum(tokens.astype(mx.uint32), group=group)


def lead(adapter: Adapter, links: Sequence[Link], group: Any, total: int, within: float) -> LeadingAdapter:
    """Hear what the others have loaded, and lead them. Raises ModelError where they cannot be led, Unavailable where
    somebody is gone or does not say anything `within` so many seconds."""
    shares = [Share.of(adapter, total), *(_share(link, within) for link in links)]
    if len({share.vocab for share in shares}) > 1:
        raise ModelError("The ranks have loaded models with different vocabularies: the same files must be on each.")
    whole = Whole.of(shares)
    known = {each.name: getattr(adapter, each.name) for each in fields(Adapter)}
    settled = {"footprint": whole.footprint, "ragged": whole.ragged, "mixed": whole.mixed}
    return LeadingAdapter(**known | settled, whole=whole, voice=Voice(links), group=group)


def _share(link: Link, within: float) -> Share:
    frame = link.receive(within)
    if frame.kind == Kind.FAILED:
        raise ModelError(frame.body.decode(errors="replace"))
    return msgspec.msgpack.decode(frame.body, type=Share)
