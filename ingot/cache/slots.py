"""The live states of all running sequences, by slot: one state per layer, a length per row.

A launch runs the model over consecutive slots, each with its own number of tokens before it; while it is open, the
states are the caches that mlx-lm's models call. Only the engine thread may call anything here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from ingot.cache.footprint import CAPACITY_STEP
from ingot.cache.launch import Launch, Mixed
from ingot.cache.layers import GroupState, LayerKind, LayerState
from ingot.cache.positions import consecutive


class Slots:
    """The live states of all running sequences: `slots` rows, each with room for `capacity` tokens."""

    def __init__(self, layers: list[LayerState]) -> None:
        self.layers = layers
        self.count, self.capacity = 1, CAPACITY_STEP
        self.lengths: list[int] = [0]
        self._written: list[int] = [0]  # to which length each slot was written, padding included, since it was empty
        self.states = [part for layer in layers for part in _parts(layer)]

    @property
    def kinds(self) -> set[LayerKind]:
        return {state.kind for state in self.states}

    def arrays(self) -> list[mx.array]:
        return [array for state in self.states for array in state.arrays()]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def witness(self) -> mx.array:
        """Something small that exists once the states do. It holds none of them, so that they stay writable."""
        newest = self.arrays()[-1]
        return mx.sum(newest[0].reshape(-1)[:1])

    def resize(self, slots: int, capacity: int) -> None:
        """Rows at or above `slots` must be empty, and no row longer than `capacity`."""
        assert not any(self.lengths[slots:]) and max(self.lengths) <= capacity
        if (slots, capacity) == (self.count, self.capacity):
            return
        for state in self.states:
            state.resize(slots, capacity)
        self.count, self.capacity = slots, capacity
        self.lengths = (self.lengths + [0] * slots)[:slots]
        self._written = [min(written, capacity) for written in (self._written + [0] * slots)[:slots]]

    def clear(self, slot: int) -> None:
        """Leave nothing of what the slot held."""
        if self._written[slot]:
            mx.eval(self.arrays())  # writing to states that are still being written copies them whole
            for state in self.states:
                state.clear(slot, self._written[slot])
        self.lengths[slot] = self._written[slot] = 0

    def filled(self, slot: int, length: int) -> None:
        """An empty slot was given `length` tokens."""
        self.lengths[slot] = length
        self._note(slot, length)

    def _note(self, slot: int, written: int) -> None:
        self._written[slot] = max(self._written[slot], written)

    def move(self, source: int, target: int) -> None:
        """Give `target` what `source` holds and leave `source` empty."""
        if source != target:
            self._transfer([source], [target], left=[source])
            self.lengths[source] = self._written[source] = 0

    def swap(self, one: int, other: int) -> None:
        self._transfer([other, one], [one, other])

    def _transfer(self, sources: list[int], targets: list[int], left: Sequence[int] = ()) -> None:
        """Slots that are `left` by their sequence are cleared.

        While states are being read, writing to them copies them whole, so what is read is read to the end first: of as
        many layers at a time as take no more memory than one of them has anyway."""
        lengths = [self.lengths[source] for source in sources]
        together = max(1, self.count // len(sources))
        for begin in range(0, len(self.states), together):
            states = self.states[begin : begin + together]
            copies = [state.lifted(sources, max(lengths)) for state in states]
            mx.eval(copies)
            for state, own in zip(states, copies, strict=True):
                state.laid(targets, own, sources)
                for slot in left:
                    state.clear(slot, self._written[slot])
            mx.async_eval([state.arrays() for state in states])
        for target, length in zip(targets, lengths, strict=True):
            self.lengths[target] = length
            self._note(target, max(lengths))

    @contextmanager
    def launch(
        self, first: int, rows: int, width: int, valid: Sequence[int] | None = None
    ) -> Iterator[list[LayerState]]:
        """The caches of a forward pass over slots [first, first + rows); afterwards the rows are longer.

        A row with fewer than `width` real tokens is padded on the right; what it computes for the padding is never
        seen by a real token. Raises nothing and changes no length if the forward pass fails.
        """
        opened = self._opened(first, rows, width, valid)
        try:
            with self._acquainted():
                for state in self.states:
                    state.prepare(opened)
                    state.open(opened)
                yield self.layers
        finally:
            for state in self.states:
                state.close()
        self._advance(opened)

    @contextmanager
    def mixed(self, parts: Sequence[tuple[int, int, int]]) -> Iterator[list[LayerState]]:
        """The caches of one forward pass over several launches, each `(first, rows, width)`, of different slots.

        Only models whose mixers take mixed launches apart understand them. Otherwise as `launch`.
        """
        opened = Mixed(tuple(self._opened(first, rows, width) for first, rows, width in parts))
        for state in self.states:
            for part in opened.parts:
                state.prepare(part)
            state.mixed = opened
        try:
            with self._acquainted():
                yield self.layers
        finally:
            for state in self.states:
                state.mixed = None
        for part in opened.parts:
            self._advance(part)

    @contextmanager
    def _acquainted(self) -> Iterator[None]:
        """While this is open, states know each other; no longer, as they would keep each other alive."""
        for state in self.states:
            state.neighbours = self.states
        try:
            yield
        finally:
            for state in self.states:
                state.neighbours = ()

    def _opened(self, first: int, rows: int, width: int, valid: Sequence[int] | None = None) -> Launch:
        starts = tuple(self.lengths[first : first + rows])
        counts = tuple(valid) if valid is not None else (width,) * rows
        assert max(starts) + width <= self.capacity, "a launch that does not fit was planned"
        for slot, start in zip(range(first, first + rows), starts, strict=True):
            self._note(slot, start + width)
        return Launch(first, starts, width, counts, consecutive(starts))

    def _advance(self, launch: Launch) -> None:
        for slot, start, count in zip(range(launch.first, launch.last), launch.starts, launch.valid, strict=True):
            self.lengths[slot] = start + count


def _parts(layer: LayerState) -> list[LayerState]:
    return layer.caches if isinstance(layer, GroupState) else [layer]
