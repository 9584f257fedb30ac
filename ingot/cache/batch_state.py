"""The batch KV state: the live states of all running sequences. Rows, the pages that they hold and the slots of their
recurrent states.

What is copied, by whom and when: a row that goes on from the middle of a page that others have gone on from copies that
page, when it does (`launch`); recurrent states are copied when a record is taken or restored, before tokens that may be
taken back or before each of them, and when there are more rows than ever before. Nothing else is: joining, leaving,
growing and reusing what is cached move no states.

Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import mlx.core as mx

from ingot.cache.attention_state import AppendState, flatten_states
from ingot.cache.codecs.names import RAW
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.footprint import REWIND_STATE_BYTES, coded_page_count
from ingot.cache.forward_batch import ForwardBatch, ForwardPart, MixedBatch, RewindPoint, Row
from ingot.cache.kv_deltas import KVPlacement, LayerDeltas, StateCheckpoint, write_deltas
from ingot.cache.layer_state import LayerKind, LayerState, RecurrentState
from ingot.cache.page_groups import PageGroup, PagePool
from ingot.cache.pages import PageCopy, PageTable


class BatchState:
    def __init__(
        self,
        layers: list[LayerState],
        most: int | None = None,
        token_bytes: Sequence[int] | None = None,
        beside: Sequence[LayerState] = (),
        earlier: int = REWIND_STATE_BYTES,
        codec: PairCodec | None = None,
        coded_bytes: int = 0,
        windows: Sequence[int | None] = (),
    ) -> None:
        """States may take `most` bytes, if that is given; a token takes so many in each group, if that is known.
        Recurrent states before each of the tokens that may be taken back may take `earlier` bytes besides.

        What layers `beside` the model's own keep of each token, a head's say, lies in the same pages and shares their
        fate; they are computed apart (`aside`).

        With a `codec`, layers that keep every token have all but a tail of them in fewer bits (`cache/footprint.py`),
        of which a token takes `coded_bytes`, if that is known.

        There are groups for all `windows`, None for layers that keep every token, also where no layer here has one.
        """
        self.layers, self.beside, self._most, self._earlier_bytes = layers, list(beside), most, earlier
        self.states = flatten_states((*layers, *beside))
        self.groups = _make_groups(self.states, token_bytes or (), codec, coded_bytes, windows)
        self.codec = codec
        self.when_encoded: Callable[[], None] = lambda: None
        """Called when pages take less than before."""
        self._slots = 1
        self._free = [0]  # slots
        self._recurrent = [state for state in self.states if isinstance(state, RecurrentState)]

    @property
    def kinds(self) -> set[LayerKind]:
        return {state.kind for state in self.states}

    @property
    def count(self) -> int:
        """Rows that there are now."""
        return self._slots - len(self._free)

    @property
    def nbytes(self) -> int:
        """Memory that exists for states now."""
        return self._stored + self.slot_bytes * self._slots

    @property
    def held_bytes(self) -> int:
        """What rows and records hold of it."""
        return sum(group.held_bytes for group in self.groups) + self.slot_bytes * self.count

    @property
    def _stored(self) -> int:
        return sum(storage.nbytes for group in self.groups for pool in group.pools for storage in pool.storages)

    @property
    def slot_bytes(self) -> int:
        """What a row's recurrent states take."""
        return sum(array.nbytes // array.shape[0] for state in self._recurrent for array in state.arrays())

    def pending(self) -> list[mx.array]:
        """The arrays that were written to since the last time."""
        return [array for state in self.states for array in state.pending()]

    def new(self, *, exact: bool = False, lora: int = 0) -> Row:
        """A row without tokens. One that is `exact` has all of them as they were computed; `lora` is the slot of the
        adapter that it goes through."""
        if not self._free:
            self._free = list(range(self._slots, 2 * self._slots))
            self._resize(2 * self._slots)
        return Row(self._free.pop(0), tuple(PageTable(group.pages) for group in self.groups), exact=exact, lora=lora)

    def leave(self, row: Row) -> None:
        """Whatever records hold of it stays."""
        for table in row.tables:
            table.release()
        self._free.append(row.slot)
        self._free.sort()

    def trim(self) -> bool:
        """Nothing runs: give back memory that nobody holds. Whether there was some."""
        assert self.count == 0
        trimmed = [group.trim() for group in self.groups]
        if self._slots > 1:
            self._free = [0]
            self._resize(1)
            return True
        return any(trimmed)

    def free(self) -> None:
        """Let go of the memory of all states at once, whoever holds them, and whatever is wrong with the counts. The
        last call.

        States and pages refer to each other. Dropping them would leave their memory to the garbage collector, which
        knows nothing of a device that is full.
        """
        with suppress(RuntimeError):  # that of the work which failed
            mx.synchronize()  # kernels that find slabs by their addresses do not keep them alive
        for group in self.groups:
            for pool in group.pools:
                pool.free()
        for state in self._recurrent:
            state.free()
        self.when_encoded = lambda: None

    def _resize(self, slots: int) -> None:
        self._slots = slots
        for state in self._recurrent:
            state.resize(slots)

    @contextmanager
    def launch(self, parts: Sequence[ForwardPart], *, mixed: bool = True) -> Iterator[list[LayerState]]:
        """The caches of a forward pass over the parts, which are of different rows; afterwards these are longer.

        Unless `mixed`, there is one part, and any model understands its caches; mixed ones take mixers that can take
        launches apart. Raises nothing and changes no length if the forward pass fails.
        """
        assert mixed or len(parts) == 1
        launches = tuple(_open_batch(part) for part in parts)
        self._remember(parts)
        self._encode(launches)
        self._make_room(launches)
        with self._opened(self.layers, launches, mixed=mixed):
            yield self.layers
        for part, launch in zip(parts, launches, strict=True):
            self._advance(part, launch)
        self._store_earlier_states(parts)

    @contextmanager
    def aside(self, launches: Sequence[ForwardBatch]) -> Iterator[list[LayerState]]:
        """The caches of a forward pass of the layers beside the model's own, over tokens that the rows have room for.
        The rows stay as long as they are."""
        with self._opened(self.beside, tuple(launches), mixed=True):
            yield self.beside

    @contextmanager
    def _opened(
        self, layers: Sequence[LayerState], launches: tuple[ForwardBatch, ...], *, mixed: bool
    ) -> Iterator[None]:
        whole, states = MixedBatch(launches) if mixed else None, flatten_states(layers)
        for state in states:
            state.neighbours = states  # no longer than for this, as they would keep each other alive
            state.mixed = whole
            if not mixed:
                state.open(launches[0])
        try:
            yield
        finally:
            for state in states:
                state.mixed, state.neighbours = None, ()
                state.close()

    @contextmanager
    def reserve_ahead(self, ends: Sequence[tuple[Row, int]]) -> Iterator[None]:
        """While this is open, rows have room for tokens up to these ends, where layers that keep every token are
        concerned. What is stored there is lost afterwards."""
        for group in self.groups:
            if group.window is None:
                copies = [copy for row, end in ends for copy in row.tables[group.number].grow(row.length, end)]
                self.provide(group)
                self.copy(group, copies)
        try:
            yield
        finally:
            for group in self.groups:
                if group.window is None:
                    for row, _ in ends:
                        row.tables[group.number].rewind(row.length)

    def _remember(self, parts: Sequence[ForwardPart]) -> None:
        """Keep what rows with tentative tokens are to be taken back to, where layers cannot go back themselves; or ask
        for it."""
        earlier = self._earlier(parts)
        for state in self._recurrent:
            state.wanted = earlier
        for part in parts:
            for row in part.rows:
                row.before = self._before(row) if part.tentative and self._recurrent and not earlier else None
        kept = [row.before for part in parts for row in part.rows if row.before is not None]
        # Now: the launch writes to the slots.
        mx.async_eval([array for before in kept for state in before.states for array in state if array is not None])

    def _earlier(self, parts: Sequence[ForwardPart]) -> int:
        """For how many of the last tokens of a launch layers are to give the states before them; 0 where some cannot,
        and where that is too much to be held."""
        most = max(part.tentative for part in parts)
        rows = sum(len(part.rows) for part in parts)
        able = all(state.gives_earlier_states for state in self._recurrent) and all(
            part.tentative <= part.width for part in parts
        )
        return most if able and most * rows * self.slot_bytes <= self._earlier_bytes else 0

    def _store_earlier_states(self, parts: Sequence[ForwardPart]) -> None:
        """What layers gave for rows with tentative tokens is theirs."""
        for part in parts:
            for row in part.rows if part.tentative and self._recurrent and self._recurrent[0].wanted else ():
                earlier = tuple(state.earlier(row.slot) for state in self._recurrent)
                row.before = RewindPoint(row.length, row.position, earlier=earlier)
        for state in self._recurrent:
            state.forget_earlier()

    def _before(self, row: Row) -> RewindPoint:
        return RewindPoint(row.length, row.position, tuple(state.row(row.slot) for state in self._recurrent))

    def rewind(self, row: Row, length: int) -> int:
        """Take back the tokens from `length` on, all of them tentative in the row's last launch, of which nothing was
        kept since; returns how long the row is now.

        Where layers are recurrent that may be less than asked for: then the row stands where it stood before that
        launch, and what was right of it is to be computed again.
        """
        before, row.before = row.before, None
        if length == row.length:
            return length
        if before is not None and before.earlier:
            for state, (arrays, place) in zip(self._recurrent, before.earlier, strict=True):
                state.put(row.slot, [array[row.length - length - 1, place : place + 1] for array in arrays])
        elif before is not None:
            for state, parts in zip(self._recurrent, before.states, strict=True):
                state.put(row.slot, parts)
            length = before.length
        row.position -= row.length - length
        row.length = length
        for table in row.tables:
            table.rewind(length)
        return length

    def checkpoint(self, row: Row) -> StateCheckpoint | None:
        """A copy of the row's recurrent states; None where layers have none."""
        if "recurrent" not in self.kinds:
            return None
        copies = StateCheckpoint(
            tuple(state.row(row.slot)) if isinstance(state, RecurrentState) else () for state in self.states
        )
        # Now: the next launch writes to the slots, and could not do so in place while these wait to be made.
        mx.async_eval(copies.arrays())
        return copies

    def resume(self, row: Row, checkpoint: StateCheckpoint) -> None:
        """Give a row the recurrent states that were copied."""
        for state, parts in zip(self.states, checkpoint, strict=True):
            if isinstance(state, RecurrentState):
                state.put(row.slot, parts)

    def codec_of(self, row: Row) -> str:
        """What some of the row's tokens went through, or what they were computed from."""
        return str(self.codec.name) if self.codec is not None and any(table.coded for table in row.tables) else RAW

    def _encode(self, launches: Sequence[ForwardBatch]) -> None:
        """Put what lies behind the rows' tails into fewer bits, before anything new is stored."""
        for group in self.groups if self.codec is not None else ():
            if group.coded is not None:
                fresh = [page for launch in launches for row in launch.rows for page in _pages_to_encode(row, group)]
                if fresh:
                    self.provide(group.coded)
                    self._encode_pages(group, fresh)
                    self.when_encoded()

    def _encode_pages(self, group: PageGroup, pages: Sequence[int]) -> None:
        group.encode(pages)

    def _make_room(self, launches: Sequence[ForwardBatch]) -> None:
        for group in self.groups:
            copies = [
                copy
                for launch in launches
                for row, start in zip(launch.rows, launch.starts, strict=True)
                for copy in row.tables[group.number].grow(start, start + launch.width)
            ]
            self.provide(group)
            self.copy(group, copies)

    def copy(self, group: PageGroup, copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages."""
        if copies:
            group.copy(copies)

    def lay(self, group: PageGroup, deltas: LayerDeltas, placement: KVPlacement) -> None:
        """Put what was outside of pages into some of a group; the caller has what is pending computed."""
        write_deltas(self.states, group, deltas, placement)

    def provide(self, pool: PagePool[Any]) -> None:
        """See that there is memory for every page of a group in one form: a group is the pool of its raw ones."""
        if not pool.provided:
            pool.provide(self._most, 0 if self._most is None else self._most - self._stored)

    def _advance(self, part: ForwardPart, launch: ForwardBatch) -> None:
        for row in launch.rows:
            row.length += launch.width
            row.position = row.position + launch.width if part.following is None else part.following
            for group in self.groups:
                if group.window is not None:
                    row.tables[group.number].forget(self._sure(row, part) - group.window + 1)

    def _sure(self, row: Row, part: ForwardPart) -> int:
        """How long the row is at least, whatever is taken back."""
        return row.length - part.tentative if row.before is None else row.before.length

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        for group in self.groups:
            group.pages.check()


def _open_batch(part: ForwardPart) -> ForwardBatch:
    starts, positions = tuple(row.length for row in part.rows), tuple(row.position for row in part.rows)
    return ForwardBatch(part.rows, part.width, starts, positions, part.positions, part.tentative, part.bidirectional)


def _pages_to_encode(row: Row, group: PageGroup) -> list[int]:
    """Pages that are to be encoded before the row's next launch."""
    return [] if row.exact else row.tables[group.number].encode(coded_page_count(row.length))


def _make_groups(
    states: Sequence[LayerState],
    token_bytes: Sequence[int],
    codec: PairCodec | None,
    coded_bytes: int,
    windows: Sequence[int | None],
) -> tuple[PageGroup, ...]:
    """A group for the append layers and one for each window, known to their states. What forgets stays raw."""
    paged = [state for state in states if isinstance(state, AppendState)]
    distinct = dict.fromkeys((*windows, *(state.window for state in paged)))
    sizes = token_bytes or [0] * len(distinct)
    groups = {
        window: PageGroup(number, window, size, codec if window is None else None, coded_bytes)
        for number, (window, size) in enumerate(zip(distinct, sizes, strict=True))
    }
    for state in paged:
        state.group = groups[state.window]
    return tuple(groups.values())
