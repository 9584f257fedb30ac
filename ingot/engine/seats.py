"""Which sequence sits in which slot: decoding rows first, without gaps, so that one launch takes them as they lie.

Joining and leaving move at most two rows.
"""

from __future__ import annotations

from typing import Protocol

from ingot.engine.sequence import Sequence


class Movable(Protocol):
    """The part of live states that seating uses."""

    def clear(self, slot: int) -> None: ...
    def move(self, source: int, target: int) -> None: ...
    def swap(self, one: int, other: int) -> None: ...


class Seats:
    def __init__(self, slots: Movable) -> None:
        self._slots = slots
        self.taken: list[Sequence] = []
        self.decoding = 0

    def sit(self, sequence: Sequence) -> None:
        """Take the next free slot. The slots must have room."""
        sequence.slot = len(self.taken)
        self.taken.append(sequence)

    def start_decoding(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._exchange(sequence.slot, self.decoding)
        self.decoding += 1
        sequence.decoding = True

    def leave(self, sequence: Sequence) -> None:
        place = sequence.slot
        assert place is not None and self.taken[place] is sequence
        self._slots.clear(place)
        if place < self.decoding:
            self.decoding -= 1
            place = self._fill(place, self.decoding)
        self._fill(place, len(self.taken) - 1)
        self.taken.pop()
        sequence.slot = None
        sequence.decoding = False

    def _fill(self, hole: int, source: int) -> int:
        """Move the row at `source` into the hole; the hole is then at `source`."""
        if hole != source:
            self._slots.move(source, hole)
            self._place(self.taken[source], hole)
        return source

    def _exchange(self, one: int, other: int) -> None:
        if one != other:
            first, second = self.taken[one], self.taken[other]
            self._slots.swap(one, other)
            self._place(first, other)
            self._place(second, one)

    def _place(self, sequence: Sequence, slot: int) -> None:
        self.taken[slot] = sequence
        sequence.slot = slot

    def check(self) -> None:
        for slot, sequence in enumerate(self.taken):
            assert sequence.slot == slot, "a sequence is not where it thinks it sits"
            assert sequence.decoding == (slot < self.decoding), "decoding rows do not come first"
