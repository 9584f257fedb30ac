"""Pages against the simplest thing that can be right: whoever holds a table sees its own tokens, and nobody else's."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ingot.cache.footprint import ENCODE_STEP_TOKENS, RAW_TAIL_TOKENS, batch_end_limit, coded_page_count, raw_page_limit
from ingot.cache.pages import PAGE, PageAllocator, PageForms, PageTable, join_tables

WINDOW = PAGE + 9
few = st.integers(0, 9)
"""Numbers a row or a record, where there are so many."""


class Holder:
    """A row or a record: a table, and the tokens that must be seen through it."""

    def __init__(self, table: PageTable, tokens: list[int], *, windowed: bool, begin: int = 0) -> None:
        self.table, self.tokens, self.windowed, self.begin = table, tokens, windowed, begin

    @property
    def oldest(self) -> int:
        seen = len(self.tokens) - WINDOW + 1 if self.windowed else 0
        return max(self.begin, seen, 0)


class Memory(RuleBasedStateMachine):
    """A page's memory is a list. What is not written yet, or belongs to nobody, is garbage."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator()
        self.memory: dict[int, list[int]] = {}
        self.rows: list[Holder] = []
        self.records: list[Holder] = []
        self.written = 0

    @rule(windowed=st.booleans())
    def start(self, windowed: bool) -> None:
        if len(self.rows) < 5:
            self.rows.append(Holder(PageTable(self.pages), [], windowed=windowed))

    @rule(number=few, count=st.integers(1, 3 * PAGE), fails=st.booleans())
    def write(self, number: int, count: int, fails: bool) -> None:
        if number >= len(self.rows):
            return
        row = self.rows[number]
        begin, end = len(row.tokens), len(row.tokens) + count
        for source, target, tokens in row.table.grow(begin, end):
            self.memory[target] = self.memory[source][:tokens] + [-1] * (PAGE - tokens)
        for place in range(begin, end):
            page = self.memory.setdefault(row.table.numbers[place // PAGE - row.table.first], [-1] * PAGE)
            self.written += 1
            page[place % PAGE] = self.written
            if not fails:
                row.tokens.append(self.written)
        if row.windowed and not fails:
            row.table.forget(len(row.tokens) - WINDOW + 1)

    @rule(number=few, count=st.integers(1, PAGE + 9), right=st.integers(0, PAGE + 9))
    def guess(self, number: int, count: int, right: int) -> None:
        """Write tokens of which only the first `right` turn out to stay."""
        if number >= len(self.rows):
            return
        row = self.rows[number]
        oldest, windowed, row.windowed = row.oldest, row.windowed, False
        self.write(number, count, fails=False)
        row.windowed = windowed
        del row.tokens[len(row.tokens) - count + min(right, count) :]
        row.table.rewind(len(row.tokens))
        if windowed:
            row.table.forget(oldest)

    @rule(number=few, begin=st.integers(0, 2 * PAGE))
    def keep(self, number: int, begin: int) -> None:
        if number < len(self.rows) and len(self.records) < 6:
            row = self.rows[number]
            begin = 0 if not row.windowed else max(begin, row.oldest)
            if begin < len(row.tokens):
                table = row.table.part(begin, len(row.tokens))
                self.records.append(Holder(table, list(row.tokens), windowed=row.windowed, begin=begin))

    @rule(number=few, length=st.integers(1, 4 * PAGE))
    def take_over(self, number: int, length: int) -> None:
        if number < len(self.records) and len(self.rows) < 5:
            record = self.records[number]
            length = len(record.tokens) if record.windowed else min(length, len(record.tokens))
            table = join_tables(self.pages, [record.table], record.oldest, length)
            assert table is not None
            self.rows.append(Holder(table, record.tokens[:length], windowed=record.windowed, begin=record.oldest))

    @rule(number=few)
    def leave(self, number: int) -> None:
        if number < len(self.rows):
            self._spoil(self.rows.pop(number).table)

    @rule(number=few)
    def evict(self, number: int) -> None:
        if number < len(self.records):
            self._spoil(self.records.pop(number).table)

    def _spoil(self, table: PageTable) -> None:
        numbers = list(table.numbers)
        table.release()
        for page in set(numbers) & set(self.pages.free):
            self.memory[page] = [-2] * PAGE

    @rule()
    def trim(self) -> None:
        self.pages.trim(self.pages.occupied)

    @invariant()
    def everybody_sees_its_own(self) -> None:
        for holder in (*self.rows, *self.records):
            for place in range(holder.oldest, len(holder.tokens)):
                page = holder.table.numbers[place // PAGE - holder.table.first]
                assert self.memory[page][place % PAGE] == holder.tokens[place]

    @invariant()
    def pages_are_counted_once(self) -> None:
        self.pages.check()
        rows = {page for row in self.rows for page in row.table.numbers}
        records = Counter(page for record in self.records for page in record.table.numbers)
        assert (self.pages.running, self.pages.kept) == (len(rows), len(records))
        assert self.pages.used == len(rows | set(records))
        assert {page for page in records if self.pages.is_held_by_one_record(page)} == {
            page for page, count in records.items() if count == 1 and page not in rows
        }


TestMemory = Memory.TestCase
TestMemory.settings = settings(stateful_step_count=30, deadline=None)


def test_two_rows_that_part_in_a_page_copy_it_once() -> None:
    pages = PageAllocator()
    first = PageTable(pages)
    first.grow(0, 100)
    kept = first.part(0, 100)
    second = join_tables(pages, [kept], 0, 100)
    assert second is not None and pages.used == 2
    assert first.grow(100, 101) == []
    [copy] = second.grow(100, 101)
    assert copy[:3] == (first.numbers[1], second.numbers[1], 100 - PAGE)
    assert second.numbers[0] == first.numbers[0] and pages.used == 3


def test_a_row_that_goes_on_from_a_full_page_copies_nothing() -> None:
    pages = PageAllocator()
    first = PageTable(pages)
    first.grow(0, 2 * PAGE)
    others = [join_tables(pages, [first.part(0, 2 * PAGE)], 0, 2 * PAGE) for _ in range(3)]
    assert all(other is not None and other.grow(2 * PAGE, 2 * PAGE + 5) == [] for other in others)
    assert pages.used == 2 + 3


def test_a_table_that_is_forgotten_gives_its_pages_back() -> None:
    pages = PageAllocator()
    table = PageTable(pages)
    table.grow(0, 300)
    kept = table.part(0, 300)
    del table
    assert pages.used == pages.kept == 5
    del kept
    assert pages.used == 0


def test_a_path_takes_each_page_from_the_last_record_that_has_it() -> None:
    pages = PageAllocator()
    row = PageTable(pages)
    row.grow(0, 90)
    upper = row.part(0, 90)
    branch = join_tables(pages, [upper], 0, 90)
    assert branch is not None
    row.grow(90, 200)
    branch.grow(90, 130)
    lower = branch.part(90, 130)
    again = join_tables(pages, [upper, lower], 0, 130)
    assert again is not None and list(again.numbers) == [upper.numbers[0], *lower.numbers]


def test_a_path_with_a_hole_is_no_path() -> None:
    pages = PageAllocator()
    row = PageTable(pages)
    row.grow(0, 4 * PAGE)
    assert join_tables(pages, [row.part(0, PAGE), row.part(2 * PAGE, 4 * PAGE)], 0, 4 * PAGE) is None


def test_the_lowest_free_page_is_taken_first() -> None:
    pages, rng = PageAllocator(), random.Random(3)
    tables = [PageTable(pages) for _ in range(9)]
    for table in tables:
        table.grow(0, PAGE * rng.randrange(1, 4))
    lost = tables.pop(2)
    free = sorted(lost.numbers)
    lost.release()
    newcomer = PageTable(pages)
    newcomer.grow(0, PAGE)
    assert newcomer.numbers[0] == free[0]


def test_a_page_that_nobody_holds_cannot_be_held() -> None:
    pages = PageAllocator()
    table = PageTable(pages)
    table.grow(0, 1)
    number = table.numbers[0]
    table.release()
    with pytest.raises(AssertionError):
        PageTable(pages, 0, [number])


@given(st.integers(0, 20 * ENCODE_STEP_TOKENS))
def test_what_a_token_sees_follows_from_its_place_however_launches_are_cut(length: int) -> None:
    end = batch_end_limit(length)
    assert length < end <= length + ENCODE_STEP_TOKENS + RAW_TAIL_TOKENS
    assert coded_page_count(end - 1) == coded_page_count(length) < coded_page_count(end)
    assert length - coded_page_count(length) * PAGE < ENCODE_STEP_TOKENS + RAW_TAIL_TOKENS
    assert not coded_page_count(length) or length - coded_page_count(length) * PAGE >= RAW_TAIL_TOKENS
    assert (coded_page_count(length) + raw_page_limit(length)) * PAGE >= length


def test_a_raw_form_goes_when_the_last_row_that_sees_it_sees_the_coded_one() -> None:
    pages = PageAllocator(PageForms())
    forms = pages.forms
    assert forms is not None
    first = PageTable(pages)
    first.grow(0, 2 * PAGE)
    second = PageTable(pages, 0, first.numbers)
    fresh = first.encode(1)
    pages.settle(fresh)
    [page] = fresh
    assert forms.is_raw(page) and forms.is_coded(page)
    assert second.encode(1) == []
    pages.settle([page])
    second.release()
    assert not forms.is_raw(page) and forms.coded.used == 1
    kept = first.part(0, 2 * PAGE)
    first.release()
    again = join_tables(pages, [kept], 0, 2 * PAGE)
    assert again is not None and again.least == 1 and again.encode(0) == [] and again.coded == 1
    pages.check()


def test_a_page_that_is_read_in_fewer_bits_takes_no_raw_memory_until_somebody_goes_on_inside_of_it() -> None:
    pages = PageAllocator(PageForms())
    forms = pages.forms
    assert forms is not None
    table = PageTable(pages, 1)
    assert list(table.add_coded(2)) == list(table.numbers)
    table.grow(3 * PAGE, 3 * PAGE + 5)
    assert (forms.raw.used, forms.coded.used, forms.raw.made) == (1, 2, 1)
    kept = table.part(PAGE, 3 * PAGE + 5)
    table.release()
    pages.check()
    row = PageTable(pages, 1, kept.numbers[:2])
    [copy] = row.grow(2 * PAGE + 7, 2 * PAGE + 9)
    assert copy.coded and copy.tokens == 7 and forms.raw.used == 2
    row.release()
    kept.release()
    pages.check()
    assert pages.used == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * PAGE), st.booleans()), max_size=30))
def test_whatever_rows_do_no_slot_is_lost(steps: list[tuple[int, int, bool]]) -> None:
    pages = PageAllocator(PageForms())
    rows: dict[int, tuple[PageTable, int]] = {}
    for number, tokens, leaves in steps:
        table, length = rows.pop(number, (PageTable(pages), 0))
        if leaves:
            table.release()
            continue
        whole = max(0, length - PAGE) // PAGE
        pages.settle(table.encode(whole))
        table.grow(length, length + tokens)
        rows[number] = (table, length + tokens)
        pages.check()
    for table, _ in rows.values():
        table.release()
    pages.check()
    assert pages.used == 0
