"""In which memory pages lie where live keys and values are coded: raw, in fewer bits, or both for a while.

A page begins raw, unless it is read from a file. It is encoded once, when the first row sees it so; its raw form goes
as soon as no running row sees that any more, whatever records hold it. Pure Python: no mlx, no arrays.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

NOWHERE: Final = -1


class Slots:
    """Room for pages in memory of one kind. The lowest that is free is taken, so that those at the end become free."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.made = 0
        self.taken = 0  # how often one was

    @property
    def used(self) -> int:
        return self.made - len(self._free)

    @property
    def free(self) -> Sequence[int]:
        return self._free

    @property
    def occupied(self) -> int:
        """Slots up to the last one that is taken."""
        free, last = set(self._free), self.made
        while last and last - 1 in free:
            last -= 1
        return last

    def take(self) -> int:
        self.taken += 1
        if self._free:
            return heapq.heappop(self._free)
        self.made += 1
        return self.made - 1

    def give(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def trim(self, made: int) -> None:
        """Forget the slots from number `made` on, which nobody has."""
        self._free = [slot for slot in self._free if slot < made]
        heapq.heapify(self._free)
        self.made = made


class Forms:
    def __init__(self) -> None:
        self.raw, self.coded = Slots(), Slots()
        self.raw_of, self.coded_of = array("i"), array("i")  # by page, its slot
        self._coded_rows: list[int] = []  # running rows that see its coded form

    def is_raw(self, page: int) -> bool:
        return self.raw_of[page] != NOWHERE

    def is_coded(self, page: int) -> bool:
        return self.coded_of[page] != NOWHERE

    def begin(self, page: int) -> None:
        """Somebody takes a page that nobody had."""
        self._know(page)
        self.raw_of[page] = self.raw.take()

    def begin_coded(self, page: int) -> None:
        """A row takes a page that nobody had, and sees it coded."""
        self._know(page)
        self.coded_of[page] = self.coded.take()
        self._coded_rows[page] = 1

    def _know(self, page: int) -> None:
        while len(self.raw_of) <= page:
            for places in (self.raw_of, self.coded_of):
                places.append(NOWHERE)
            self._coded_rows.append(0)

    def end(self, page: int) -> None:
        """Nobody has it any more."""
        assert not self._coded_rows[page], "a row sees a page that nobody holds"
        for places, slots in ((self.raw_of, self.raw), (self.coded_of, self.coded)):
            if places[page] != NOWHERE:
                slots.give(places[page])
                places[page] = NOWHERE

    def encode(self, pages: Iterable[int]) -> list[int]:
        """A row sees these coded from now on. Gives those that are to be encoded for it: they have both forms now, the
        one still to be written, until `settle` is told."""
        fresh = []
        for page in pages:
            self._coded_rows[page] += 1
            if self.coded_of[page] == NOWHERE:
                self.coded_of[page] = self.coded.take()
                fresh.append(page)
        return fresh

    def leave(self, pages: Iterable[int]) -> None:
        """A row that saw these coded does no more."""
        for page in pages:
            assert self._coded_rows[page], "a row left a page that it did not see coded"
            self._coded_rows[page] -= 1

    def settle(self, page: int, rows: int) -> None:
        """Of `rows` that hold a page, those that see it coded are known here: where these are all of them, its raw
        form goes."""
        if self.is_coded(page) and self.is_raw(page) and rows == self._coded_rows[page]:
            self.raw.give(self.raw_of[page])
            self.raw_of[page] = NOWHERE

    def sees_coded(self, page: int) -> bool:
        """Whether some running row does."""
        return self._coded_rows[page] > 0

    def trim(self, pages: int) -> None:
        for by_page in (self.raw_of, self.coded_of, self._coded_rows):
            del by_page[pages:]

    def check(self, rows: Sequence[int], held: Iterable[int]) -> None:
        """`rows` hold each page; `held` are those that somebody does."""
        pages = set(held)
        for places, slots in ((self.raw_of, self.raw), (self.coded_of, self.coded)):
            taken = [slot for slot in places if slot != NOWHERE]
            assert len(set(taken)) == len(taken) == slots.used, "a slot is lost, or two pages share one"
            assert not set(taken) & set(slots.free), "a slot that is taken is free"
        for page, (raw, coded) in enumerate(zip(self.raw_of, self.coded_of, strict=True)):
            assert (page in pages) == (raw != NOWHERE or coded != NOWHERE), "a page lies nowhere, or is nobody's"
            assert self._coded_rows[page] <= rows[page], "more rows see a page coded than hold it"
