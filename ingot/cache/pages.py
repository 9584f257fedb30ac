"""Page allocation: who holds which KV page, and in which memory it lies.

A page has room for `PAGE` consecutive tokens of one sequence, in every layer of a group: layers that forget alike.
Pages are counted by reference; running rows and cached records hold them through page tables. What is written to a page
is never changed, only added to, and only by the sequence that stands where its writing ended: whoever else wants to go
on from inside of it gets a copy. So two holders of a page can never see each other's tokens, whatever they do.

Where live keys and values are quantised, `PageForms` knows where each page lies: raw, coded (in fewer bits), or both
for a while. A page begins raw, unless it is read from a file. It is encoded once, when the first row sees it so; its
raw form goes as soon as no running row sees that any more, whatever records hold it.

Pure Python: no mlx, no arrays.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

PAGE = 64
"""Tokens of a page: a block of keys, as the kernels take them."""


def pages_for_tokens(tokens: int) -> int:
    """How many pages so many tokens take."""
    return -(-tokens // PAGE)


class PageCopy(NamedTuple):
    """The first `tokens` tokens of a page are to be copied to another, before anything else is written there: slots of
    raw pages, but for a source that is `coded`."""

    source: int
    target: int
    tokens: int
    coded: bool = False


class PageAllocator:
    """The pages of one group of layers. Free ones are taken from the lowest on, so that those at the end become
    free."""

    def __init__(self, forms: PageForms | None = None) -> None:
        """`forms` know where pages lie, if that may be in fewer bits."""
        self.forms = forms
        self._free: list[int] = []
        self._by_rows: list[int] = []  # how many running rows hold each page
        self._by_records: list[int] = []
        self._charged: list[int] = []  # how many of those records count it as theirs: one, but for a moment
        self._written: list[int] = []  # tokens of each, from its beginning on
        self.running = 0  # pages that some row holds
        self.kept = 0  # pages that some record holds
        self.both = 0
        self.uncharged = 0  # pages that some record holds and none counts, as the one that did is gone
        self.taken = 0  # how often one was

    @property
    def made(self) -> int:
        return len(self._written)

    @property
    def used(self) -> int:
        return self.made - len(self._free)

    @property
    def free(self) -> Sequence[int]:
        return self._free

    def take(self) -> int:
        """An empty page, held by one row."""
        page = self._taken(0)
        if self.forms is not None:
            self.forms.begin(page)
        return page

    def take_coded(self) -> int:
        """A full page, held by one row, that has no form but the one in fewer bits: it is the caller's to write."""
        assert self.forms is not None
        page = self._taken(PAGE)
        self.forms.begin_coded(page)
        return page

    def _taken(self, written: int) -> int:
        if not self._free:
            self._free.append(self.made)
            for count in (self._by_rows, self._by_records, self._charged, self._written):
                count.append(0)
        page = heapq.heappop(self._free)
        self._written[page] = written
        self._by_rows[page] = 1
        self.running += 1
        self.taken += 1
        return page

    def hold(self, pages: Iterable[int], *, kept: bool) -> None:
        mine, theirs = self._counts(kept=kept)
        for page in pages:
            assert mine[page] or theirs[page], "a page that nobody holds is taken, not held"
            mine[page] += 1
            if mine[page] == 1:
                self._changed(1, kept=kept, shared=theirs[page] > 0)

    def drop(self, pages: Iterable[int], *, kept: bool) -> None:
        mine, theirs = self._counts(kept=kept)
        for page in pages:
            assert mine[page], "a page is dropped more often than it was held"
            mine[page] -= 1
            if not mine[page]:
                self._changed(-1, kept=kept, shared=theirs[page] > 0)
                if not theirs[page]:
                    heapq.heappush(self._free, page)
                    if self.forms is not None:
                        self.forms.end(page)
                    continue
            if self.forms is not None:
                self.forms.settle(page, self._by_rows[page])

    def charge_pages(self, pages: Iterable[int]) -> None:
        """A record counts these, which it holds, as its own."""
        for page in pages:
            self._charged[page] += 1
            self.uncharged -= self._charged[page] == 1

    def uncharge_pages(self, pages: Iterable[int]) -> None:
        """It is about to drop them."""
        for page in pages:
            self._charged[page] -= 1
            self.uncharged += not self._charged[page]

    def copied(self, source: int, target: int, tokens: int) -> PageCopy:
        if self.forms is None:
            return PageCopy(source, target, tokens)
        coded = not self.forms.is_raw(source)
        places = self.forms.coded_of if coded else self.forms.raw_of
        return PageCopy(places[source], self.forms.raw_of[target], tokens, coded)

    def encode(self, pages: Sequence[int]) -> list[int]:
        """A row that holds these sees them in fewer bits from now on. Gives those that nobody has seen so: they are to
        be encoded, and then `settle`d."""
        assert self.forms is not None and all(self._written[page] == PAGE for page in pages), "a page is not full"
        return self.forms.encode(pages)

    def settle(self, pages: Iterable[int]) -> None:
        """Let go of the raw forms that no row sees."""
        assert self.forms is not None
        for page in pages:
            self.forms.settle(page, self._by_rows[page])

    def shared(self) -> list[int]:
        """Pages that both rows and records hold."""
        return [
            page for page, (rows, kept) in enumerate(zip(self._by_rows, self._by_records, strict=True)) if rows and kept
        ]

    def _counts(self, *, kept: bool) -> tuple[list[int], list[int]]:
        return (self._by_records, self._by_rows) if kept else (self._by_rows, self._by_records)

    def _changed(self, by: int, *, kept: bool, shared: bool) -> None:
        if kept:
            self.kept += by
            self.uncharged += by
        else:
            self.running += by
        if shared:
            self.both += by

    def is_kept(self, page: int) -> bool:
        return self._by_records[page] > 0

    def is_held_once(self, page: int) -> bool:
        """Whether it becomes free when the one record that holds it goes."""
        return self._by_records[page] == 1 and not self._by_rows[page]

    def is_idle(self, page: int) -> bool:
        """Whether no running row holds it."""
        return not self._by_rows[page]

    def written(self, page: int) -> int:
        return self._written[page]

    def extend(self, page: int, end: int) -> None:
        assert self._written[page] <= end <= PAGE, "a page is written twice"
        self._written[page] = end

    def retract(self, page: int, end: int) -> None:
        """What was written behind `end` is nobody's: whoever wrote it takes it back before anyone else has seen it."""
        assert end <= self._written[page], "what was never written is taken back"
        self._written[page] = end

    def trim(self, made: int) -> None:
        """Forget the pages from number `made` on, which nobody holds."""
        self._free = [page for page in self._free if page < made]
        heapq.heapify(self._free)
        for count in (self._by_rows, self._by_records, self._charged, self._written):
            del count[made:]
        if self.forms is not None:
            self.forms.trim(made)

    @property
    def occupied(self) -> int:
        """Pages up to the last one that somebody holds."""
        held = (page for page in range(self.made - 1, -1, -1) if self._by_rows[page] or self._by_records[page])
        return next(held, -1) + 1

    def check(self) -> None:
        free = {page for page in range(self.made) if not self._by_rows[page] and not self._by_records[page]}
        assert free == set(self._free) and len(free) == len(self._free), "a page that is held is free, or lost"
        rows = {page for page, count in enumerate(self._by_rows) if count}
        records = {page for page, count in enumerate(self._by_records) if count}
        assert (self.running, self.kept, self.both) == (len(rows), len(records), len(rows & records)), (
            "pages miscounted"
        )
        paid = {page for page, count in enumerate(self._charged) if count}
        assert paid <= records and self.uncharged == len(records - paid), "pages are paid for by nobody, or twice"
        if self.forms is not None:
            self.forms.check(self._by_rows, rows | records)


class PageTable:
    """The pages of one sequence in one group, and the right to them, which ends with `release` or with the table.

    `numbers[i]` holds the tokens from (first + i) * PAGE on. Those of a running row grow; a record's are `kept`, and
    stay. The first `coded` pages are those that the row sees in fewer bits, and of the first `least` some have no other
    form. A record counts those that it `charge_pages`s for as its own.
    """

    __slots__ = ("coded", "first", "kept", "least", "numbers", "pages", "paid")

    def __init__(
        self, pages: PageAllocator, first: int = 0, numbers: Iterable[int] = (), *, kept: bool = False
    ) -> None:
        """Holds the pages `numbers` once more."""
        self.pages, self.first, self.kept = pages, first, kept
        self.coded = self.least = 0
        self.paid = array("i")
        self.numbers = array("i")
        held = array("i", numbers)
        pages.hold(held, kept=kept)
        self.numbers = held

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        held, self.numbers = self.numbers, array("i")
        paid, self.paid = self.paid, array("i")
        self.pages.uncharge_pages(paid)
        self._leave_coded(held[: self.coded])
        self.pages.drop(held, kept=self.kept)

    def charge_pages(self, first: int) -> None:
        """Count the pages from number `first` on as this table's, from now to its end."""
        assert self.kept
        if not self.paid:  # by another part that has the same table
            self.paid = self.numbers[max(0, first - self.first) :]
            self.pages.charge_pages(self.paid)

    def _leave_coded(self, pages: Sequence[int]) -> None:
        """A row is about to drop pages that it sees in fewer bits."""
        if pages and self.pages.forms is not None:
            self.pages.forms.leave(pages)

    def encode(self, count: int) -> list[int]:
        """See the first `count` pages in fewer bits, and all that have no other form; gives those to be encoded."""
        count = max(count, self.least)
        if count <= self.coded:
            return []
        seen, self.coded = self.numbers[self.coded : count], count
        return self.pages.encode(seen)

    def add_coded(self, count: int) -> Sequence[int]:
        """Full pages behind those it has, all of them seen in fewer bits: they are the caller's to write."""
        assert self.coded == len(self.numbers), "a page in fewer bits stands behind a raw one"
        self.numbers.extend(self.pages.take_coded() for _ in range(count))
        self.coded += count
        return self.numbers[self.coded - count :]

    @property
    def end(self) -> int:
        return self.first + len(self.numbers)

    def grow(self, length: int, end: int) -> list[PageCopy]:
        """Make room for tokens [length, end) of a sequence whose first `length` are there; says what must be copied."""
        copies = []
        inside = length % PAGE
        self._cut(pages_for_tokens(length))
        if length < end and inside and self.pages.written(self.numbers[-1]) != inside:
            source, own = self.numbers[-1], self.pages.take()
            self.pages.extend(own, inside)
            copies.append(self.pages.copied(source, own, inside))
            self.numbers[-1] = own
            self.pages.drop([source], kept=False)
        while self.end * PAGE < end:
            self.numbers.append(self.pages.take())
        for number in range(length // PAGE, pages_for_tokens(end)):
            self.pages.extend(self.numbers[number - self.first], min(PAGE, end - number * PAGE))
        return copies

    def rewind(self, length: int) -> None:
        """Take back the tokens from `length` on, which this sequence wrote last and nobody has taken over since."""
        self._cut(pages_for_tokens(length))
        if length % PAGE:
            self.pages.retract(self.numbers[-1], length % PAGE)

    def _cut(self, end: int) -> None:
        """Let go of the pages behind the sequence's end, where a forward pass failed that would have filled them, or
        what it wrote is taken back."""
        if self.end > end:
            assert end - self.first >= self.coded, "what was encoded is taken back"
            self.pages.drop(self.numbers[end - self.first :], kept=self.kept)
            del self.numbers[end - self.first :]

    def forget(self, oldest: int) -> None:
        """Let go of the pages whose tokens all stand before `oldest`."""
        gone = min(max(0, oldest // PAGE - self.first), len(self.numbers))
        if gone:
            self.pages.drop(self.numbers[:gone], kept=self.kept)
            del self.numbers[:gone]
            self.first += gone

    def part(self, begin: int, end: int) -> PageTable:
        """The pages of tokens [begin, end), as far as it has them, for a record."""
        first = max(self.first, begin // PAGE)
        chosen = self.numbers[first - self.first : max(0, pages_for_tokens(end) - self.first)] if begin < end else ()
        return PageTable(self.pages, first, chosen, kept=True)


def join_tables(pages: PageAllocator, tables: Iterable[PageTable], begin: int, end: int) -> PageTable | None:
    """The pages of tokens [begin, end) of a path of records, for a row: each from the last record that has it, since
    one that goes on in the middle of a page holds what came before too. None where some page is nobody's."""
    found: dict[int, int] = {}
    for table in tables:
        found.update(enumerate(table.numbers, table.first))
    wanted = range(begin // PAGE, pages_for_tokens(end))
    if not all(number in found for number in wanted):
        return None
    table = PageTable(pages, wanted.start, [found[number] for number in wanted])
    if pages.forms is not None:
        # Whoever goes on from inside of a page is given a raw copy.
        whole = enumerate(table.numbers[: end // PAGE], 1)
        table.least = max((count for count, page in whole if not pages.forms.is_raw(page)), default=0)
    return table


NO_SLOT: Final = -1


class PageSlots:
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


class PageForms:
    def __init__(self) -> None:
        self.raw, self.coded = PageSlots(), PageSlots()
        self.raw_of, self.coded_of = array("i"), array("i")  # by page, its slot
        self._coded_rows: list[int] = []  # running rows that see its coded form

    def is_raw(self, page: int) -> bool:
        return self.raw_of[page] != NO_SLOT

    def is_coded(self, page: int) -> bool:
        return self.coded_of[page] != NO_SLOT

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
                places.append(NO_SLOT)
            self._coded_rows.append(0)

    def end(self, page: int) -> None:
        """Nobody has it any more."""
        assert not self._coded_rows[page], "a row sees a page that nobody holds"
        for places, slots in ((self.raw_of, self.raw), (self.coded_of, self.coded)):
            if places[page] != NO_SLOT:
                slots.give(places[page])
                places[page] = NO_SLOT

    def encode(self, pages: Iterable[int]) -> list[int]:
        """A row sees these coded from now on. Gives those that are to be encoded for it: they have both forms now, the
        one still to be written, until `settle` is told."""
        fresh = []
        for page in pages:
            self._coded_rows[page] += 1
            if self.coded_of[page] == NO_SLOT:
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
            self.raw_of[page] = NO_SLOT

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
            taken = [slot for slot in places if slot != NO_SLOT]
            assert len(set(taken)) == len(taken) == slots.used, "a slot is lost, or two pages share one"
            assert not set(taken) & set(slots.free), "a slot that is taken is free"
        for page, (raw, coded) in enumerate(zip(self.raw_of, self.coded_of, strict=True)):
            assert (page in pages) == (raw != NO_SLOT or coded != NO_SLOT), "a page lies nowhere, or is nobody's"
            assert self._coded_rows[page] <= rows[page], "more rows see a page coded than hold it"
