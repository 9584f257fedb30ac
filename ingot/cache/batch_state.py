"""The batch KV state: the live state of all running sequences. Rows, the pages that they hold and the slots of their
recurrent states.

What is copied: a row that continues from within a page that others have continued copies that page (`launch`);
recurrent states are copied when a record is taken or restored, before tokens that may be taken back (unless kernels
write to another slot, or return the states before each of them), and when there are more rows than ever before.
Joining, leaving, growing and reusing cached prefixes copy nothing.

Only the engine thread may call anything here.
"""

from __future__ import annotations

from bisect import insort
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
    _has_spares = True
    """Whether rows may change their slots."""

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
        """All states may take `most` bytes, or any number; `token_bytes` has the bytes of a token by group, if known.
        Copies of recurrent states before each token that may be taken back may take `earlier` bytes more.

        Auxiliary layers (`beside`), such as a draft head's, store their keys and values in the same pages; they are
        computed separately (`aside`).

        With a `codec`, append layers have all tokens but a tail coded (`cache/footprint.py`); a token then takes
        `coded_bytes`, if known.

        There is a group for each of `windows` (None for append layers), even if no layer here has that window.
        """
        self.layers, self.beside, self._most, self._earlier_bytes = layers, list(beside), most, earlier
        self.states = flatten_states((*layers, *beside))
        self.groups = _make_groups(self.states, token_bytes or (), codec, coded_bytes, windows)
        self.codec = codec
        self.when_encoded: Callable[[], None] = lambda: None
        """Called when pages became smaller."""
        self._slots = 1
        self._free = [0]  # slots
        self._spares = 0  # slots that rows may be rewound to, or have come from
        self._recurrent = [state for state in self.states if isinstance(state, RecurrentState)]

    @property
    def kinds(self) -> set[LayerKind]:
        return {state.kind for state in self.states}

    @property
    def count(self) -> int:
        """Rows that there are now."""
        return self._slots - len(self._free) - self._spares

    @property
    def nbytes(self) -> int:
        """Memory that is allocated for states."""
        return self._stored + self.slot_bytes * self._slots

    @property
    def held_bytes(self) -> int:
        """The part of it that rows and records use."""
        return sum(group.held_bytes for group in self.groups) + self.slot_bytes * (self._slots - len(self._free))

    @property
    def _stored(self) -> int:
        return sum(storage.nbytes for group in self.groups for pool in group.pools for storage in pool.storages)

    @property
    def slot_bytes(self) -> int:
        """The size of a row's recurrent states."""
        return sum(state.slot_bytes for state in self._recurrent)

    def pending(self) -> list[mx.array]:
        """The arrays that were written to since the last call."""
        return [array for state in self.states for array in state.pending()]

    def new(self, *, exact: bool = False, lora: int = 0) -> Row:
        """A row without tokens. One that is `exact` is never coded; `lora` is the slot of its adapter."""
        return Row(self._take_slot(), tuple(PageTable(group.pages) for group in self.groups), exact=exact, lora=lora)

    def leave(self, row: Row) -> None:
        """Remove a row. Pages that records hold stay."""
        for table in row.tables:
            table.release()
        for state in self._recurrent:
            state.leave(row.slot)
        self._forget(row)
        insort(self._free, row.slot)

    def trim(self) -> bool:
        """Free unused memory while nothing runs. Returns whether there was any."""
        assert self.count == 0
        trimmed = [group.trim() for group in self.groups]
        if self._slots > 1:
            self._free = [0]
            self._resize(1)
            return True
        return any(trimmed)

    def free(self) -> None:
        """Free the memory of all states at once, even if the counts are wrong. Must be the last call.

        States and pages refer to each other. Otherwise their memory would be left to the garbage collector, which does
        not run when a device is full.
        """
        with suppress(RuntimeError):  # from work that failed
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
    def launch(self, parts: Sequence[ForwardPart], *, mixed: bool = True) -> Iterator[list[Any]]:
        """The caches of a forward pass over parts of different rows, which are longer afterwards.

        Unless `mixed`, there is one part, and any model can use the caches; a mixed batch needs layers that can split
        it. If the forward pass fails, no length changes.
        """
        assert mixed or len(parts) == 1
        batches = tuple(_open_batch(part) for part in parts)
        self._remember(parts)
        try:
            self._encode(batches)
            self._make_room(batches)
            with self._opened(self.layers, batches, mixed=mixed):
                yield [layer.as_cache for layer in self.layers]
        except BaseException:
            for row in (row for part in parts for row in part.rows):
                if row.target is not None:
                    self._free_spare(row.target)
                    row.before = row.target = None
            raise
        for part, batch in zip(parts, batches, strict=True):
            self._advance(part, batch)
        self._store_earlier_states(parts)

    @contextmanager
    def aside(self, batches: Sequence[ForwardBatch]) -> Iterator[list[LayerState]]:
        """The caches of a forward pass of the auxiliary layers, over tokens that the rows have room for. The rows'
        lengths do not change."""
        with self._opened(self.beside, tuple(batches), mixed=True):
            yield self.beside

    @contextmanager
    def _opened(
        self, layers: Sequence[LayerState], batches: tuple[ForwardBatch, ...], *, mixed: bool
    ) -> Iterator[None]:
        whole, states = MixedBatch(batches) if mixed else None, flatten_states(layers)
        for state in states:
            state.neighbours = states  # only for this pass, as they would keep each other alive
            state.mixed = whole
            if not mixed:
                state.open(batches[0])
        try:
            yield
        finally:
            for state in states:
                state.mixed, state.neighbours = None, ()
                state.close()

    @contextmanager
    def reserve_ahead(self, ends: Sequence[tuple[Row, int]]) -> Iterator[None]:
        """While this is open, rows have room for tokens up to these ends in append layers. What is stored there is
        discarded afterwards."""
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
        """See that rows with tentative tokens can be rewound: have the layers write their recurrent states to spare
        slots, or return those before each token, or copy them."""
        for row in (row for part in parts for row in part.rows):
            self._forget(row)
        earlier = self._earlier(parts) if any(part.tentative for part in parts) else 0
        for state in self._recurrent:
            state.wanted = earlier
        if earlier or not self._recurrent:
            return
        for row in (row for part in parts if part.tentative for row in part.rows):
            row.target = self._take_spare()
            states = () if row.target is not None else tuple(state.row(row.slot) for state in self._recurrent)
            row.before = RewindPoint(row.length, row.position, row.slot if row.target is not None else None, states)
        copies = [row.before for part in parts for row in part.rows if row.before is not None]
        # Now, as the forward pass writes to the slots.
        mx.async_eval([array for before in copies for state in before.states for array in state if array is not None])

    def _earlier(self, parts: Sequence[ForwardPart]) -> int:
        """For how many of the last tokens layers are to return the states before them; 0 where some cannot, or these
        would take too much memory."""
        most = max(part.tentative for part in parts)
        rows = sum(len(part.rows) for part in parts)
        able = all(state.returns_earlier_states for state in self._recurrent) and all(
            part.tentative <= part.width for part in parts
        )
        return most if able and most * rows * self.slot_bytes <= self._earlier_bytes else 0

    def _store_earlier_states(self, parts: Sequence[ForwardPart]) -> None:
        """Set the rewind points of rows with tentative tokens to the states that layers returned."""
        for part in parts:
            for row in part.rows if part.tentative and self._recurrent and self._recurrent[0].wanted else ():
                earlier = tuple(state.earlier(row.slot) for state in self._recurrent)
                row.before = RewindPoint(row.length, row.position, earlier=earlier)
        for state in self._recurrent:
            state.forget_earlier()

    def _forget(self, row: Row) -> None:
        """It is not rewound any more."""
        before, row.before = row.before, None
        if before is not None and before.slot is not None:
            self._free_spare(before.slot)

    def _take_spare(self) -> int | None:
        """A slot that belongs to no row; None where the layers cannot use one, or it would take too much memory."""
        if not self._has_spares or not all(state.moves_rows for state in self._recurrent):
            return None
        if not self._free and self._slots * self.slot_bytes > self._earlier_bytes:
            return None
        self._spares += 1
        return self._take_slot()

    def _free_spare(self, slot: int) -> None:
        self._spares -= 1
        insort(self._free, slot)

    def _take_slot(self) -> int:
        if not self._free:
            self._free = list(range(self._slots, 2 * self._slots))
            self._resize(2 * self._slots)
        return self._free.pop(0)

    def rewind(self, row: Row, length: int) -> int:
        """Take back the tokens from `length` on, all tentative in the row's last forward pass, of which no record was
        taken since. Returns the row's length.

        With recurrent layers that may be shorter than `length`: then the row is where it was before that pass, and the
        accepted tokens must be computed again.
        """
        before, row.before = row.before, None
        if before is not None and before.slot is not None:
            row.slot, spare = (row.slot, before.slot) if length == row.length else (before.slot, row.slot)
            self._free_spare(spare)
        if length == row.length:
            return length
        if before is not None and before.earlier:
            for state, (arrays, index) in zip(self._recurrent, before.earlier, strict=True):
                state.put(row.slot, [array[row.length - length - 1, index : index + 1] for array in arrays])
        elif before is not None:
            for state, parts in zip(self._recurrent if before.slot is None else (), before.states, strict=True):
                state.put(row.slot, parts)
            length = before.length
        row.position -= row.length - length
        row.length = length
        for table in row.tables:
            table.rewind(length)
        return length

    def checkpoint(self, row: Row) -> StateCheckpoint | None:
        """A copy of the row's recurrent states; None where there are none."""
        if "recurrent" not in self.kinds:
            return None
        copies = StateCheckpoint(
            tuple(state.row(row.slot)) if isinstance(state, RecurrentState) else () for state in self.states
        )
        # Now, as the next pass writes to the slots, which it could not do in place while these copies are pending.
        mx.async_eval(copies.arrays())
        return copies

    def resume(self, row: Row, checkpoint: StateCheckpoint) -> None:
        """Restore a row's recurrent states."""
        for state, parts in zip(self.states, checkpoint, strict=True):
            if isinstance(state, RecurrentState):
                state.put(row.slot, parts)

    def codec_of(self, row: Row) -> str:
        """The codec that some of the row's tokens went through."""
        return str(self.codec.name) if self.codec is not None and any(table.coded for table in row.tables) else RAW

    def _encode(self, batches: Sequence[ForwardBatch]) -> None:
        """Encode the pages behind the rows' tails, before anything new is stored."""
        for group in self.groups if self.codec is not None else ():
            if group.coded is not None:
                rows = [row for batch in batches for row in batch.rows if not row.exact]
                new_pages = [
                    page for row in rows for page in row.tables[group.number].encode(coded_page_count(row.length))
                ]
                if new_pages:
                    self.provide(group.coded)
                    self._encode_pages(group, new_pages)
                    self.when_encoded()

    def _encode_pages(self, group: PageGroup, pages: Sequence[int]) -> None:
        group.encode(pages)

    def _make_room(self, batches: Sequence[ForwardBatch]) -> None:
        for group in self.groups:
            copies = [
                copy
                for batch in batches
                for row, start in zip(batch.rows, batch.starts, strict=True)
                for copy in row.tables[group.number].grow(start, start + batch.width)
            ]
            self.provide(group)
            self.copy(group, copies)

    def copy(self, group: PageGroup, copies: Sequence[PageCopy]) -> None:
        """Copy the beginnings of pages."""
        if copies:
            group.copy(copies)

    def lay(self, group: PageGroup, deltas: LayerDeltas, placement: KVPlacement) -> None:
        """Write deltas to pages of a group. The caller evaluates what is pending."""
        write_deltas(self.states, group, deltas, placement)

    def provide(self, pool: PagePool[Any]) -> None:
        """Make sure that there is memory for every page of a pool: a group, for its raw pages, or its coded pool."""
        if not pool.provided:
            pool.provide(self._most, 0 if self._most is None else self._most - self._stored)

    def _advance(self, part: ForwardPart, batch: ForwardBatch) -> None:
        for row in batch.rows:
            row.slot, row.target = row.slot_after, None
            row.length += batch.width
            row.position = row.position + batch.width if part.following is None else part.following
            for group in self.groups:
                if group.window is not None:
                    row.tables[group.number].forget(self._sure(row, part) - group.window + 1)

    def _sure(self, row: Row, part: ForwardPart) -> int:
        """The row's length if all tentative tokens are taken back."""
        return row.length - part.tentative if row.before is None else row.before.length

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        for group in self.groups:
            group.pages.check()


def _open_batch(part: ForwardPart) -> ForwardBatch:
    starts, positions = tuple(row.length for row in part.rows), tuple(row.position for row in part.rows)
    return ForwardBatch(part.rows, part.width, starts, positions, part.positions, part.tentative, part.bidirectional)


def _make_groups(
    states: Sequence[LayerState],
    token_bytes: Sequence[int],
    codec: PairCodec | None,
    coded_bytes: int,
    windows: Sequence[int | None],
) -> tuple[PageGroup, ...]:
    """A group for the append layers and one for each window, set on their states. Windows stay raw."""
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
