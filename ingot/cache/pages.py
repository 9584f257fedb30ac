"""Page allocation: who holds which KV page, and in which slot of memory it is.

A page has room for `PAGE` consecutive tokens of one sequence, in every layer of a group (layers with the same window).
Pages are reference-counted; running rows and cached records hold them through page tables. What is written to a page is
never changed, only appended to, and only by the sequence whose end is where the page's tokens end. Any other sequence
that continues from within the page gets a copy. So two holders of a page never see each other's tokens.

Where live keys and values are quantised, `PageForms` has the slot of each page: raw, coded (in fewer bits), or both for
a while. A page begins raw, unless it is read from a file. It is encoded once, when the first row reads it coded, and
its raw form is freed as soon as no running row reads that any more.

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
    return -(-tokens // PAGE)


class PageCopy(NamedTuple):
    """Copy the first `tokens` tokens of a page to another one before anything else is written there. Both are slots of
    raw pages, unless the source is `coded`."""

    source: int
    target: int
    tokens: int
    coded: bool = False


class PageSlots:
    """Slots for pages in one kind of memory. The lowest free slot is allocated first, so that the last become free."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.made = 0
        self.taken = 0  # allocations so far

    @property
    def used(self) -> int:
        return self.made - len(self._free)

    @property
    def free(self) -> Sequence[int]:
        return self._free

    @property
    def occupied(self) -> int:
        """Slots up to the last one in use."""
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
        """Forget the slots from number `made` on, which are free."""
        self._free = [slot for slot in self._free if slot < made]
        heapq.heapify(self._free)
        self.made = made


class PageAllocator(PageSlots):
    """The pages of one group of layers."""

    def __init__(self, forms: PageForms | None = None) -> None:
        """`forms` have the pages' slots, where pages may be coded."""
        super().__init__()
        self.forms = forms
        self._by_rows: list[int] = []  # how many running rows hold each page
        self._by_records: list[int] = []
        self._charged: list[int] = []  # how many of those records are charged for it: one, except for a moment
        self._written: list[int] = []  # how many tokens of each are written
        self.running = 0  # pages that some row holds
        self.kept = 0  # pages that some record holds
        self.both = 0
        self.uncharged = 0  # pages that records hold and none is charged for, as the one that was is gone

    def take(self) -> int:
        """An empty page, held by one row."""
        page = self._allocate(0)
        if self.forms is not None:
            self.forms.begin(page)
        return page

    def take_coded(self) -> int:
        """A full page, held by one row, that is only coded. The caller writes it."""
        assert self.forms is not None
        page = self._allocate(PAGE)
        self.forms.begin_coded(page)
        return page

    def _allocate(self, written: int) -> int:
        page = super().take()
        if page == len(self._written):
            for count in (self._by_rows, self._by_records, self._charged, self._written):
                count.append(0)
        self._written[page] = written
        self._by_rows[page] = 1
        self.running += 1
        return page

    def hold(self, pages: Iterable[int], *, cached: bool) -> None:
        mine, theirs = self._counts(cached=cached)
        for page in pages:
            assert mine[page] or theirs[page], "a free page must be allocated"
            mine[page] += 1
            if mine[page] == 1:
                self._changed(1, cached=cached, shared=theirs[page] > 0)

    def drop(self, pages: Iterable[int], *, cached: bool) -> None:
        mine, theirs = self._counts(cached=cached)
        for page in pages:
            assert mine[page], "a page is dropped twice"
            mine[page] -= 1
            if not mine[page]:
                self._changed(-1, cached=cached, shared=theirs[page] > 0)
                if not theirs[page]:
                    self.give(page)
                    if self.forms is not None:
                        self.forms.end(page)
                    continue
            if self.forms is not None:
                self.forms.settle(page, self._by_rows[page])

    def charge_pages(self, pages: Iterable[int]) -> None:
        """Charge a record for pages that it holds."""
        for page in pages:
            self._charged[page] += 1
            self.uncharged -= self._charged[page] == 1

    def uncharge_pages(self, pages: Iterable[int]) -> None:
        """The record is about to drop them."""
        for page in pages:
            self._charged[page] -= 1
            self.uncharged += not self._charged[page]

    def copied(self, source: int, target: int, tokens: int) -> PageCopy:
        if self.forms is None:
            return PageCopy(source, target, tokens)
        coded = not self.forms.is_raw(source)
        slots = self.forms.coded_of if coded else self.forms.raw_of
        return PageCopy(slots[source], self.forms.raw_of[target], tokens, coded)

    def encode(self, pages: Sequence[int]) -> list[int]:
        """A row that holds these reads them coded from now on. Returns those that are not coded yet: the caller encodes
        them, and then calls `settle`."""
        assert self.forms is not None and all(self._written[page] == PAGE for page in pages), "a page is not full"
        return self.forms.encode(pages)

    def settle(self, pages: Iterable[int]) -> None:
        """Free the raw forms that no row reads."""
        assert self.forms is not None
        for page in pages:
            self.forms.settle(page, self._by_rows[page])

    def shared(self) -> list[int]:
        """Pages that both rows and records hold."""
        return [page for page in range(self.made) if self._by_rows[page] and self._by_records[page]]

    def _counts(self, *, cached: bool) -> tuple[list[int], list[int]]:
        return (self._by_records, self._by_rows) if cached else (self._by_rows, self._by_records)

    def _changed(self, by: int, *, cached: bool, shared: bool) -> None:
        if cached:
            self.kept += by
            self.uncharged += by
        else:
            self.running += by
        if shared:
            self.both += by

    def is_cached(self, page: int) -> bool:
        return self._by_records[page] > 0

    def is_held_by_one_record(self, page: int) -> bool:
        """Whether it becomes free when the only record that holds it does."""
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
        """Discard what was written behind `end`, before any other holder could read it."""
        assert end <= self._written[page], "tokens are taken back that were never written"
        self._written[page] = end

    def trim(self, made: int) -> None:
        super().trim(made)
        for count in (self._by_rows, self._by_records, self._charged, self._written):
            del count[made:]
        if self.forms is not None:
            self.forms.trim(made)

    def check(self) -> None:
        free = {page for page in range(self.made) if not self._by_rows[page] and not self._by_records[page]}
        assert free == set(self._free) and len(free) == len(self._free), "a page in use is free, or one is lost"
        rows = {page for page, count in enumerate(self._by_rows) if count}
        records = {page for page, count in enumerate(self._by_records) if count}
        assert (self.running, self.kept, self.both) == (len(rows), len(records), len(rows & records)), (
            "pages miscounted"
        )
        charged = {page for page, count in enumerate(self._charged) if count}
        assert charged <= records and self.uncharged == len(records - charged), "pages are paid for by nobody, or twice"
        if self.forms is not None:
            self.forms.check(self._by_rows, rows | records)


class PageTable:
    """The pages of one sequence in one group, held until `release` or the end of the table.

    `numbers[i]` has the tokens from (first + i) * PAGE on. A running row's table grows; a record's is `cached` and
    stays as it is. The row reads the first `coded` pages coded; of the first `least`, some have no other form. A record
    is charged for the pages in `charged`.
    """

    __slots__ = ("cached", "charged", "coded", "first", "least", "numbers", "pages")

    def __init__(
        self, pages: PageAllocator, first: int = 0, numbers: Iterable[int] = (), *, cached: bool = False
    ) -> None:
        """Adds a reference to each page of `numbers`."""
        self.pages, self.first, self.cached = pages, first, cached
        self.coded = self.least = 0
        self.charged = array("i")
        self.numbers = array("i")  # what `__del__` releases if holding fails
        added = array("i", numbers)
        pages.hold(added, cached=cached)
        self.numbers = added

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        numbers, self.numbers = self.numbers, array("i")
        charged, self.charged = self.charged, array("i")
        self.pages.uncharge_pages(charged)
        if self.coded and self.pages.forms is not None:
            self.pages.forms.leave(numbers[: self.coded])
        self.pages.drop(numbers, cached=self.cached)

    def charge_pages(self, first: int) -> None:
        """Charge this table for the pages from number `first` on, from now to its end."""
        assert self.cached
        if not self.charged:  # not yet, by another part with the same table
            self.charged = self.numbers[max(0, first - self.first) :]
            self.pages.charge_pages(self.charged)

    def encode(self, count: int) -> list[int]:
        """Read the first `count` pages coded, and all that have no other form. Returns those to be encoded."""
        count = max(count, self.least)
        if count <= self.coded:
            return []
        pages, self.coded = self.numbers[self.coded : count], count
        return self.pages.encode(pages)

    def add_coded(self, count: int) -> Sequence[int]:
        """Append full coded pages, which the caller writes."""
        assert self.coded == len(self.numbers), "a coded page stands behind a raw one"
        self.numbers.extend(self.pages.take_coded() for _ in range(count))
        self.coded += count
        return self.numbers[self.coded - count :]

    @property
    def end(self) -> int:
        return self.first + len(self.numbers)

    def grow(self, length: int, end: int) -> list[PageCopy]:
        """Make room for tokens [length, end) of a sequence that has `length`. Returns the copies to make first."""
        copies = []
        inside = length % PAGE
        self._cut(pages_for_tokens(length))
        if length < end and inside and self.pages.written(self.numbers[-1]) != inside:
            source, own = self.numbers[-1], self.pages.take()
            self.pages.extend(own, inside)
            copies.append(self.pages.copied(source, own, inside))
            self.numbers[-1] = own
            self.pages.drop([source], cached=False)
        while self.end * PAGE < end:
            self.numbers.append(self.pages.take())
        for number in range(length // PAGE, pages_for_tokens(end)):
            self.pages.extend(self.numbers[number - self.first], min(PAGE, end - number * PAGE))
        return copies

    def rewind(self, length: int) -> None:
        """Take back the tokens from `length` on, which this sequence wrote last and nobody has reused since."""
        self._cut(pages_for_tokens(length))
        if length % PAGE:
            self.pages.retract(self.numbers[-1], length % PAGE)

    def _cut(self, end: int) -> None:
        """Drop the pages behind the sequence's end, after a forward pass that failed or whose tokens are taken back."""
        if self.end > end:
            assert end - self.first >= self.coded, "coded pages are taken back"
            self.pages.drop(self.numbers[end - self.first :], cached=self.cached)
            del self.numbers[end - self.first :]

    def forget(self, oldest: int) -> None:
        """Drop the pages whose tokens are all before `oldest`."""
        gone = min(max(0, oldest // PAGE - self.first), len(self.numbers))
        if gone:
            self.pages.drop(self.numbers[:gone], cached=self.cached)
            del self.numbers[:gone]
            self.first += gone

    def part(self, begin: int, end: int) -> PageTable:
        """A record's table of the pages of tokens [begin, end), as far as this one has them."""
        first = max(self.first, begin // PAGE)
        numbers = self.numbers[first - self.first : max(0, pages_for_tokens(end) - self.first)] if begin < end else ()
        return PageTable(self.pages, first, numbers, cached=True)


def join_tables(pages: PageAllocator, tables: Iterable[PageTable], begin: int, end: int) -> PageTable | None:
    """A row's table of the pages of tokens [begin, end) of a path of records: each from the last record that has it,
    since one that continues from within a page has its earlier tokens too. None where a page is missing."""
    found: dict[int, int] = {}
    for table in tables:
        found.update(enumerate(table.numbers, table.first))
    numbers = range(begin // PAGE, pages_for_tokens(end))
    if not all(number in found for number in numbers):
        return None
    table = PageTable(pages, numbers.start, [found[number] for number in numbers])
    if pages.forms is not None:
        # A row that continues from within a page gets a raw copy of it.
        full = enumerate(table.numbers[: end // PAGE], 1)
        table.least = max((count for count, page in full if not pages.forms.is_raw(page)), default=0)
    return table


NO_SLOT: Final = -1


class PageForms:
    def __init__(self) -> None:
        self.raw, self.coded = PageSlots(), PageSlots()
        self.raw_of, self.coded_of = array("i"), array("i")  # by page, its slot
        self._coded_rows: list[int] = []  # by page, the running rows that read its coded form

    def is_raw(self, page: int) -> bool:
        return self.raw_of[page] != NO_SLOT

    def is_coded(self, page: int) -> bool:
        return self.coded_of[page] != NO_SLOT

    def begin(self, page: int) -> None:
        """A page is allocated, raw."""
        self._extend(page)
        self.raw_of[page] = self.raw.take()

    def begin_coded(self, page: int) -> None:
        """A page is allocated for a row that reads it coded."""
        self._extend(page)
        self.coded_of[page] = self.coded.take()
        self._coded_rows[page] = 1

    def _extend(self, page: int) -> None:
        while len(self.raw_of) <= page:
            self.raw_of.append(NO_SLOT)
            self.coded_of.append(NO_SLOT)
            self._coded_rows.append(0)

    def end(self, page: int) -> None:
        """The page is free."""
        assert not self._coded_rows[page], "a row reads a free page"
        for by_page, slots in ((self.raw_of, self.raw), (self.coded_of, self.coded)):
            if by_page[page] != NO_SLOT:
                slots.give(by_page[page])
                by_page[page] = NO_SLOT

    def encode(self, pages: Iterable[int]) -> list[int]:
        """A row reads these coded from now on. Returns those that are to be encoded for it: they have both slots until
        `settle` is called."""
        uncoded = []
        for page in pages:
            self._coded_rows[page] += 1
            if self.coded_of[page] == NO_SLOT:
                self.coded_of[page] = self.coded.take()
                uncoded.append(page)
        return uncoded

    def leave(self, pages: Iterable[int]) -> None:
        """A row that read these coded does not any more."""
        for page in pages:
            assert self._coded_rows[page], "a row left a page that it did not read coded"
            self._coded_rows[page] -= 1

    def settle(self, page: int, rows: int) -> None:
        """Free the raw form of a page that `rows` rows hold, if all of them read it coded."""
        if self.is_coded(page) and self.is_raw(page) and rows == self._coded_rows[page]:
            self.raw.give(self.raw_of[page])
            self.raw_of[page] = NO_SLOT

    def sees_coded(self, page: int) -> bool:
        """Whether some running row reads it coded."""
        return self._coded_rows[page] > 0

    def trim(self, pages: int) -> None:
        for by_page in (self.raw_of, self.coded_of, self._coded_rows):
            del by_page[pages:]

    def check(self, rows: Sequence[int], used: Iterable[int]) -> None:
        """`rows` has the number of rows that hold each page; `used` are the pages in use."""
        pages = set(used)
        for by_page, slots in ((self.raw_of, self.raw), (self.coded_of, self.coded)):
            taken = [slot for slot in by_page if slot != NO_SLOT]
            assert len(set(taken)) == len(taken) == slots.used, "a slot is lost, or two pages share one"
            assert not set(taken) & set(slots.free), "a slot in use is free"
        for page, (raw, coded) in enumerate(zip(self.raw_of, self.coded_of, strict=True)):
            assert (page in pages) == (raw != NO_SLOT or coded != NO_SLOT), "a page has no slot, or a free page has one"
            assert self._coded_rows[page] <= rows[page], "more rows read a page coded than hold it"
