"""Immutable pieces of computed state: what tokens [begin, end) of some sequence left in every layer.

A record owns its arrays: they are copies, never views of a live slot. Append and window layers contribute a delta, the
keys and values of the record's own tokens (a window layer only those that a token at `end` can still see); recurrent
layers contribute a checkpoint, their state after token `end`, where one was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ingot.cache.arrays import copied
from ingot.cache.layers import AppendState, RecurrentState, WindowState
from ingot.cache.slots import Slots


@dataclass(frozen=True, slots=True)
class KVDelta:
    """Keys and values of tokens [begin, end) in one layer; no arrays when that is empty."""

    begin: int
    end: int
    arrays: tuple[mx.array, ...]

    def part(self, begin: int, end: int) -> KVDelta:
        begin, end = max(begin, self.begin), min(end, self.end)
        if (begin, end) == (self.begin, self.end):
            return self
        if begin >= end:
            return KVDelta(begin, begin, ())
        cut = slice(begin - self.begin, end - self.begin)
        return KVDelta(begin, end, tuple(copied(array[:, :, cut]) for array in self.arrays))


Checkpoint = tuple[tuple[mx.array | None, ...], ...]
"""The parts of each layer's state; empty for layers that are not recurrent."""


@dataclass(frozen=True, slots=True)
class Record:
    begin: int
    end: int
    deltas: tuple[KVDelta | None, ...]  # one per layer state, None for recurrent ones
    checkpoint: Checkpoint | None = None

    def arrays(self) -> list[mx.array]:
        held = [array for delta in self.deltas if delta is not None for array in delta.arrays]
        return held + self._checkpoint_arrays()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def _checkpoint_arrays(self) -> list[mx.array]:
        return [array for layer in self.checkpoint or () for array in layer if array is not None]

    def split(self, at: int) -> tuple[Record, Record]:
        """Two records that cover the same tokens; what the first's end looked like to recurrent layers is unknown."""
        parts = [(None, None) if delta is None else self._split(delta, at) for delta in self.deltas]
        first, second = tuple(one for one, _ in parts), tuple(other for _, other in parts)
        halves = Record(self.begin, at, first), Record(at, self.end, second, self.checkpoint)
        # Until they are made, each half holds on to the whole, and evicting one would free nothing.
        mx.async_eval([half.arrays() for half in halves])
        return halves

    def _split(self, delta: KVDelta, at: int) -> tuple[KVDelta, KVDelta]:
        if delta.begin < self.begin:
            return KVDelta(at, at, ()), delta  # it reaches back so as to need nobody before it, and still does
        return delta.part(self.begin, at), delta.part(at, self.end)

    def without_checkpoint(self) -> Record:
        return replace(self, checkpoint=None)

    def oldest(self, layer: int) -> int:
        """The first token whose keys and values it has for a layer; behind its end where it has none."""
        delta = self.deltas[layer]
        return self.begin if delta is None else delta.begin


def take(slots: Slots, slot: int, begin: int, back: int | None = None) -> Record:
    """A record of what `slot` computed from token `begin` to its end, with a checkpoint.

    Window layers begin there too, or at `back`, where nobody has what a token at its end sees of earlier ones.
    """
    end = slots.lengths[slot]
    deltas: list[KVDelta | None] = []
    checkpoint: list[tuple[mx.array | None, ...]] = []
    for state in slots.states:
        if isinstance(state, RecurrentState):
            deltas.append(None)
            checkpoint.append(tuple(state.row(slot)))
            continue
        assert isinstance(state, AppendState)
        first = begin if back is None or not isinstance(state, WindowState) else back
        oldest = max(first, state.oldest(slot, end))
        held = state.tokens(slot, oldest, end) if oldest < end else []
        deltas.append(KVDelta(oldest, end, tuple(copied(array) for array in held)))
        checkpoint.append(())
    return Record(begin, end, tuple(deltas), tuple(checkpoint) if "recurrent" in slots.kinds else None)


def put(slots: Slots, slot: int, records: Sequence[Record], length: int) -> None:
    """Make the empty `slot` hold the first `length` tokens of what the records, in order, cover from token 0 on.

    Raises RuntimeError where they leave out a token that some layer sees: a slot is never longer than what was written.
    """
    assert slots.lengths[slot] == 0 and records[0].begin == 0 and records[-1].end >= length
    for number, state in enumerate(slots.states):
        if isinstance(state, RecurrentState):
            checkpoint = records[-1].checkpoint
            assert checkpoint is not None and records[-1].end == length
            state.put(slot, checkpoint[number])
            continue
        assert isinstance(state, AppendState)
        oldest = max(0, length - state.window + 1) if isinstance(state, WindowState) else 0
        state.begin_row(slot, oldest)
        written = oldest
        for record in records:
            delta = record.deltas[number]
            assert delta is not None
            part = delta.part(oldest, length)
            if part.arrays and part.begin <= written < part.end:
                state.put(slot, part.begin, part.arrays)
                written = part.end
        if written != length:
            raise RuntimeError(f"records of layer {number} end at token {written} of {length}")
    slots.filled(slot, length)
