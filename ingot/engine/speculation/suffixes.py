"""Where the newest tokens of a text stood before: an index of its n-grams, for a few lengths n.

Each length has a table from an n-gram's hash to where it last stood. Tables have no chains: who comes later takes the
place, and what is found is compared with the text. So an entry may be lost, never wrong; a table takes as little memory
as it says, and what is old makes way by itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

SHORTEST = 1
"""Tokens that two places must have in common. One says little, but in a text that is copied, that is much."""
LENGTHS = (24, 12, 6, 3, 2, SHORTEST)
"""Of the n-grams that are indexed."""
LONGEST = 64
"""Tokens that are compared to say how long a match is."""
LEAST_SLOTS, MOST_SLOTS = 1 << 12, 1 << 18
"""Of a table. One that is to hold more n-grams than that forgets old ones."""
SPARE = 4
"""Slots for each n-gram, at least, as long as there may be more: of two that share one the older is lost."""
SLOT_BYTES = 4 * len(LENGTHS)
"""What a slot takes in all tables; a token takes twice SPARE slots at most."""

_MOST_GONE = 1 << 30
_ONE_BY_ONE = 16  # tokens up to which it is faster to index them one after another


@dataclass(frozen=True, slots=True)
class Match:
    """The text's end stands somewhere else as well, `length` tokens of it, before place `at`."""

    at: int
    length: int


class Suffixes:
    """Of a list of tokens that grows at its end, and is its owner's. It may shrink at its beginning, if told so."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._gone = 0  # tokens that once stood before the first
        self._next = 1  # the next place to be indexed, counted from the first token that ever was
        self._tables = _tables(len(tokens))

    @property
    def unlearned(self) -> int:
        """Tokens that are not indexed yet."""
        return max(0, self._gone + len(self._tokens) - self._next)

    @property
    def nbytes(self) -> int:
        return sum(len(table) * table.itemsize for table in self._tables)

    def learn(self, most: int) -> int:
        """Index so many more tokens at most; returns how many that were. The last one is left out until there is
        something to follow it."""
        if self.unlearned and SPARE * len(self._tokens) > len(self._tables[0]) < MOST_SLOTS:
            self._begin_anew(2 * len(self._tokens))
        count = max(0, min(most, self.unlearned))
        begin = self._next
        self._next += count
        if count > _ONE_BY_ONE:
            self._index_all(begin, self._next)
        else:
            self._index_each(range(begin, self._next))
        return count

    def drop(self, count: int) -> None:
        """The first so many tokens go."""
        del self._tokens[:count]
        self._gone += count
        self._next = max(self._next, self._gone + 1)
        if self._gone > _MOST_GONE or len(self._tables[0]) > max(4 * SPARE * len(self._tokens), LEAST_SLOTS):
            self._begin_anew(len(self._tokens))

    def following(self, at: int, most: int) -> list[int]:
        """The tokens that follow a match, so many at most."""
        return self._tokens[at : at + most]

    def find(self, newest: list[int]) -> Match | None:
        """The longest match of a text that ends with the tokens `newest`, as far as is known: of those of a length, the
        latest."""
        for length, table in zip(LENGTHS, self._tables, strict=True):
            ending = newest[-length:]
            at = table[hash(tuple(ending)) & len(table) - 1] - self._gone
            if at >= length == len(ending) and self._tokens[at - length : at] == ending:
                return Match(at, self._common(at, newest, length))
        return None

    def _begin_anew(self, tokens: int) -> None:
        """With empty tables for so many tokens; what is there is learned again, a piece at a time as ever."""
        self._tables, self._gone, self._next = _tables(tokens), 0, 1

    def _common(self, at: int, newest: list[int], known: int) -> int:
        """How many tokens before `at` are the newest ones."""
        most = min(at, len(newest), LONGEST)
        if self._tokens[at - most : at] == newest[-most:]:
            return most
        while known < most and self._tokens[at - known - 1] == newest[-known - 1]:
            known += 1
        return known

    def _index_each(self, places: Iterable[int]) -> None:
        for place in places:
            at = place - self._gone
            for length, table in zip(LENGTHS, self._tables, strict=True):
                if at >= length:
                    table[hash(tuple(self._tokens[at - length : at])) & len(table) - 1] = place

    def _index_all(self, begin: int, end: int) -> None:
        """The same at once: what is done to each token, no code of ours does."""
        for length, table in zip(LENGTHS, self._tables, strict=True):
            first = max(begin, self._gone + length)
            if first < end:
                text = self._tokens[first - self._gone - length : end - self._gone - 1]
                ngrams = zip(*(text[place:] for place in range(length)), strict=False)
                hashes = np.fromiter(map(hash, ngrams), dtype=np.int64, count=end - first)
                np.frombuffer(table, dtype=np.int32)[hashes & len(table) - 1] = np.arange(first, end)


def _tables(tokens: int) -> list[array[int]]:
    slots = LEAST_SLOTS
    while slots < min(SPARE * tokens, MOST_SLOTS):
        slots *= 2
    return [array("i", [-1]) * slots for _ in LENGTHS]
