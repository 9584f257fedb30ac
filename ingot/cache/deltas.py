"""Keys and values of a layer outside of pages: as arrays, raw or encoded, which can be cut by tokens."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ingot.cache.arrays import copied

TOKENS = 2
"""The axis of tokens. It has a length of 1 where an array is what all of them share."""


@dataclass(frozen=True, slots=True)
class KVDelta:
    """What tokens [begin, end) have in one layer: keys and values [1, heads, tokens, size], or what they were encoded
    to; no arrays when there are no tokens."""

    begin: int
    end: int
    arrays: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def coded(self) -> int:
        """Pages that are in fewer bits, from the first on."""
        return 0

    @property
    def raw(self) -> KVDelta:
        """The tokens behind those."""
        return self

    def with_coded(self, pages: int) -> KVDelta:
        """The same with no more pages in fewer bits than so many."""
        return self

    def behind(self, begin: int, whole: int) -> KVDelta:
        """What lies behind a token, of a record that begins at `whole`. What reaches back before that does so still."""
        if self.begin < whole or self.begin >= begin:
            return self
        return KVDelta(begin, self.end, tuple(_cut(array, begin - self.begin, None) for array in self.arrays))

    def before(self, end: int, whole: int) -> KVDelta:
        """What lies before a token, of a record that begins at `whole`. What reaches back is about the record's end."""
        if self.begin < whole or self.begin >= end:
            return KVDelta(end, end, ())
        return KVDelta(self.begin, min(self.end, end), tuple(_cut(array, 0, end - self.begin) for array in self.arrays))

    def copied(self) -> KVDelta:
        """The same in memory of its own, so that what it was cut from can go."""
        return KVDelta(self.begin, self.end, tuple(copied(array) for array in self.arrays))


class Deltas(tuple[KVDelta | None, ...]):
    """One for each layer's state, None for recurrent ones."""

    __slots__ = ()

    def arrays(self) -> list[mx.array]:
        return [array for delta in self if delta is not None for array in delta.arrays]

    @property
    def nbytes(self) -> int:
        return sum(delta.nbytes for delta in self if delta is not None)

    def behind(self, begin: int, whole: int) -> Deltas:
        """What lies behind a token, of a record that begins at `whole`."""
        return Deltas(None if delta is None else delta.behind(begin, whole) for delta in self)

    def before(self, end: int, whole: int) -> Deltas:
        """What lies before it."""
        return Deltas(None if delta is None else delta.before(end, whole) for delta in self)

    def copied(self) -> Deltas:
        """The same in memory of its own."""
        return Deltas(None if delta is None else delta.copied() for delta in self)

    def split(self, at: int, whole: int) -> tuple[Deltas, Deltas]:
        """Both, each in memory of its own."""
        first, second = self.before(at, whole).copied(), self.behind(at, whole).copied()
        mx.eval(first.arrays(), second.arrays())
        return first, second


def _cut(array: mx.array, begin: int, end: int | None) -> mx.array:
    return array if array.shape[TOKENS] == 1 else array[:, :, begin:end]
