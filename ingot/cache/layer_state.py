"""The base of all live layer states, which are the caches of a forward batch; and the states of recurrent layers, a
slot for each row, which only move forward. Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal

import mlx.core as mx

from ingot.cache.arrays import copy_array, pad_to_length, resize_rows
from ingot.cache.forward_batch import AttentionMask, CacheOffset, ForwardBatch, MixedBatch, PerBatch, TokenSpan
from ingot.upstream import ArraysCache

LayerKind = Literal["append", "window", "recurrent"]


class LayerState:
    """The base of the three kinds: the batch that is being computed."""

    kind: LayerKind

    def __init__(self) -> None:
        self.batch: ForwardBatch | None = None
        self.mixed: MixedBatch | None = None
        self.neighbours: Sequence[Any] = ()  # all layers' states, this one among them

    @property
    def open_batch(self) -> ForwardBatch:
        assert self.batch is not None, "it uses a layer's state outside of a forward pass"
        return self.batch

    @property
    def whole(self) -> MixedBatch | None:
        """The open mixed batch, unless one of its parts is being computed."""
        return self.mixed if self.batch is None else None

    @property
    def opened(self) -> ForwardBatch | MixedBatch:
        return self.open_batch if self.whole is None else self.whole

    @property
    def as_cache(self) -> Any:
        """What the model is given as the layer's cache."""
        return self

    @contextmanager
    def computing(self, batch: ForwardBatch) -> Iterator[None]:
        """While this is open, the state is the cache of one batch, which may be part of a mixed one."""
        self.open(batch)
        try:
            yield
        finally:
            self.close()

    def open(self, batch: ForwardBatch) -> None:
        self.batch = batch

    def close(self) -> None:
        self.batch = None

    @property
    def offset(self) -> CacheOffset:
        return self.opened.offset

    @property
    def pieces(self) -> Sequence[TokenSpan]:
        """The sequences that are being computed."""
        return self.opened.pieces

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> AttentionMask | PerBatch:
        if self.whole is None:
            return self._mask(width, return_array, window_size)
        parts = tuple(self._mask_of(part, return_array, window_size) for part in self.whole.parts)
        return None if all(part is None for part in parts) else self._masks(parts, window_size)

    def _mask_of(self, part: ForwardBatch, return_array: bool, window_size: int | None) -> AttentionMask:
        with self.computing(part):
            return self._mask(part.width, return_array, window_size)

    def _masks(self, parts: tuple[AttentionMask, ...], window_size: int | None) -> PerBatch:
        """The masks of the parts of a mixed batch."""
        assert self.whole is not None
        return PerBatch(self.whole, parts)

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> AttentionMask:
        """Which of its sequence's tokens each token of the open batch sees."""
        raise NotImplementedError

    def pending(self) -> list[mx.array]:
        """The arrays that were written to since the last call."""
        raise NotImplementedError

    # Some models tie arrays to the keys of a layer's cache to have them evaluated; ours are `pending`.

    @property
    def keys(self) -> mx.array:
        return mx.zeros(0)

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        pass

    @property
    def values(self) -> mx.array:
        return mx.zeros(0)

    @values.setter
    def values(self, tied: mx.array) -> None:
        pass


_versions = count()


class RecurrentState(LayerState, ArraysCache):
    """Convolution tails, SSM and gated-delta states. An ArraysCache, by which models recognise recurrent layers."""

    kind: LayerKind = "recurrent"
    left_padding = None
    lengths = None  # no batch is padded

    def __init__(self, parts: int, slots: int = 1) -> None:
        LayerState.__init__(self)
        self.cache: list[mx.array | None] = [None] * parts
        self.version = next(_versions)
        """Another number whenever the parts may be elsewhere in memory; no other state has the same."""
        self._slots = slots
        self._written: set[int] = set()
        self.returns_earlier_states = False
        """Whether its native kernel also returns the states before each token."""
        self.wanted = 0  # for how many of a batch's last tokens these are wanted
        self.moves_rows = False
        """Whether its kernels may write a row's states to another slot than they read them from."""
        self._earlier: tuple[Sequence[mx.array], list[int]] = ((), [])  # these states, and their slots

    # For the batch state

    def resize(self, slots: int) -> None:
        self._slots = slots
        self.exchange([None if part is None else resize_rows(part, slots) for part in self.cache])
        mx.eval(self.arrays())

    @property
    def slot_bytes(self) -> int:
        """The size of a row's state."""
        return sum(array.nbytes // array.shape[0] for array in self.arrays())

    def leave(self, slot: int) -> None:
        """A row's slot is free."""

    def free(self) -> None:
        """Free all slots. Must be the last call."""
        self.cache = [None] * len(self.cache)
        self.forget_earlier()

    def arrays(self) -> list[mx.array]:
        return [part for part in self.cache if part is not None]

    def pending(self) -> list[mx.array]:
        return self.arrays()

    def row(self, slot: int) -> list[mx.array | None]:
        """Copies of the row's state; None for parts that the model has not written."""
        return [None if part is None else copy_array(part[slot : slot + 1]) for part in self.cache]

    def put(self, slot: int, parts: Sequence[mx.array | None]) -> None:
        """Restore a state that `row` returned."""
        for index, part in enumerate(parts):
            if part is not None:
                # A copy: with one slot, the part would become the whole array, which is written in place.
                self._store(index, slice(slot, slot + 1), copy_array(part))

    def earlier(self, slot: int) -> tuple[Sequence[mx.array], int]:
        """The states before each of the batch's last tokens: parts for all its rows, and the row's index there."""
        parts, slots = self._earlier
        return parts, slots.index(slot)

    def forget_earlier(self) -> None:
        self.wanted, self._earlier = 0, ((), [])

    def _store(self, index: int, slots: slice | mx.array, rows: mx.array) -> None:
        part = self.cache[index]
        if part is None:
            part = mx.zeros((self._slots, *rows.shape[1:]), rows.dtype)
        # A history of the newest tokens grows with its sequence at first, and is padded with zeros in front.
        part, rows = pad_to_length(part, rows), pad_to_length(rows, part)
        part[slots] = rows
        self.cache[index] = part
        self.version = next(_versions)

    # For native kernels

    def lend(self, *rows: tuple[int, ...]) -> list[mx.array]:
        """All slots' parts, of these shapes for a row: there may be fewer than the model's own code has. The caller
        writes them in place and returns them by `return_parts`."""
        self._drop_unused(len(rows))
        parts = [
            mx.zeros((self._slots, *shape), mx.float32) if part is None else part.astype(mx.float32)
            for part, shape in zip(self.cache, rows, strict=True)
        ]
        self.cache = [None] * len(parts)
        return parts

    def _drop_unused(self, count: int) -> None:
        """Keep as many parts: nothing may have written the others."""
        assert not any(part is not None for part in self.cache[count:]), "parts of another mixer"
        del self.cache[count:]

    def return_parts(self, parts: Sequence[mx.array]) -> None:
        """The parts, followed by the earlier ones, as many as `wanted`."""
        self.exchange(parts[: len(self.cache)])
        earlier = parts[len(self.cache) :]
        self._earlier = (earlier, [slot for _, _, slot, _ in self.pieces] if earlier else [])

    # For kernels of a GPU

    def in_place(self, *rows: tuple[int, ...]) -> list[mx.array]:
        """All slots' parts, of these shapes for a row, in float32, which are written in place and stay where they
        are."""
        self.moves_rows = True
        self._drop_unused(len(rows))
        if any(part is None or part.dtype != mx.float32 for part in self.cache):
            self.return_parts(self.lend(*rows))
        return self.arrays()

    def put_rows(self, parts: Sequence[mx.array]) -> None:
        """The parts after the open pass, of its sequences alone, where kernels do not write in place."""
        slots = mx.array(self.opened.targets)
        for index, rows in enumerate(parts):
            self._store(index, slots, rows)

    def exchange(self, parts: Sequence[mx.array | None]) -> list[mx.array | None]:
        """Take these parts instead, and return the ones before."""
        before, self.cache, self.version = self.cache, list(parts), next(_versions)
        return before

    # For mlx-lm's models

    def open(self, batch: ForwardBatch) -> None:
        self._written = set()
        super().open(batch)

    def __getitem__(self, index: int) -> mx.array | None:
        batch, part = self.open_batch, self.cache[index]
        # Models recognise a sequence's beginning by a missing state, which may not mean the same as zeros.
        if part is None or (not any(batch.starts) and index not in self._written):
            return None
        return part[_batch_slots(batch)]

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._written.add(index)
        self._store(index, _batch_slots(self.open_batch), value)

    def advance(self, count: int) -> None:
        """Rows have their lengths, and are advanced when the forward pass ends."""

    def _mask(self, width: int, return_array: bool, window_size: int | None) -> AttentionMask:
        return None


def _batch_slots(batch: ForwardBatch) -> slice | mx.array:
    """The rows' slots: a slice where they are consecutive."""
    slots = [row.slot for row in batch.rows]
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return batch.slots
