"""Pages against the simplest thing that can be right: whoever holds a table sees its own tokens, and nobody else's."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ingot.cache.pages import PAGE, Pages, Table, joined

WINDOW = PAGE + 9
few = st.integers(0, 9)
"""Numbers a row or a record, where there are so many."""


class Holder:
    """A row or a record: a table, and the tokens that must be seen through it."""

    def __init__(self, table: Table, tokens: list[int], *, windowed: bool, begin: int = 0) -> None:
        self.table, self.tokens, self.windowed, self.begin = table, tokens, windowed, begin

    @property
    def oldest(self) -> int:
        seen = len(self.tokens) - WINDOW + 1 if self.windowed else 0
        return max(self.begin, seen, 0)


class Memory(RuleBasedStateMachine):
    """A page's memory is a list. What is not written yet, or belongs to nobody, is garbage."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages()
        self.memory: dict[int, list[int]] = {}
        self.rows: list[Holder] = []
        self.records: list[Holder] = []
        self.written = 0

    @rule(windowed=st.booleans())
    def start(self, windowed: bool) -> None:
        if len(self.rows) < 5:
            self.rows.append(Holder(Table(self.pages), [], windowed=windowed))

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
            table = joined(self.pages, [record.table], record.oldest, length)
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

    def _spoil(self, table: Table) -> None:
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
        assert {page for page in records if self.pages.is_loose(page)} == {
            page for page, count in records.items() if count == 1 and page not in rows
        }


TestMemory = Memory.TestCase
TestMemory.settings = settings(stateful_step_count=30, deadline=None)


def test_two_rows_that_part_in_a_page_copy_it_once() -> None:
    pages = Pages()
    first = Table(pages)
    first.grow(0, 100)
    kept = first.part(0, 100)
    second = joined(pages, [kept], 0, 100)
    assert second is not None and pages.used == 2
    assert first.grow(100, 101) == []
    [copy] = second.grow(100, 101)
    assert copy[:3] == (first.numbers[1], second.numbers[1], 100 - PAGE)
    assert second.numbers[0] == first.numbers[0] and pages.used == 3


def test_a_row_that_goes_on_from_a_full_page_copies_nothing() -> None:
    pages = Pages()
    first = Table(pages)
    first.grow(0, 2 * PAGE)
    others = [joined(pages, [first.part(0, 2 * PAGE)], 0, 2 * PAGE) for _ in range(3)]
    assert all(other is not None and other.grow(2 * PAGE, 2 * PAGE + 5) == [] for other in others)
    assert pages.used == 2 + 3


def test_a_table_that_is_forgotten_gives_its_pages_back() -> None:
    pages = Pages()
    table = Table(pages)
    table.grow(0, 300)
    kept = table.part(0, 300)
    del table
    assert pages.used == pages.kept == 5
    del kept
    assert pages.used == 0


def test_a_path_takes_each_page_from_the_last_record_that_has_it() -> None:
    pages = Pages()
    row = Table(pages)
    row.grow(0, 90)
    upper = row.part(0, 90)
    branch = joined(pages, [upper], 0, 90)
    assert branch is not None
    row.grow(90, 200)
    branch.grow(90, 130)
    lower = branch.part(90, 130)
    again = joined(pages, [upper, lower], 0, 130)
    assert again is not None and list(again.numbers) == [upper.numbers[0], *lower.numbers]


def test_a_path_with_a_hole_is_no_path() -> None:
    pages = Pages()
    row = Table(pages)
    row.grow(0, 4 * PAGE)
    assert joined(pages, [row.part(0, PAGE), row.part(2 * PAGE, 4 * PAGE)], 0, 4 * PAGE) is None


def test_the_lowest_free_page_is_taken_first() -> None:
    pages, rng = Pages(), random.Random(3)
    tables = [Table(pages) for _ in range(9)]
    for table in tables:
        table.grow(0, PAGE * rng.randrange(1, 4))
    lost = tables.pop(2)
    free = sorted(lost.numbers)
    lost.release()
    newcomer = Table(pages)
    newcomer.grow(0, PAGE)
    assert newcomer.numbers[0] == free[0]


def test_a_page_that_nobody_holds_cannot_be_held() -> None:
    pages = Pages()
    table = Table(pages)
    table.grow(0, 1)
    number = table.numbers[0]
    table.release()
    with pytest.raises(AssertionError):
        Table(pages, 0, [number])
