"""Which form pages lie in, and how much of a sequence is coded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.forms import Forms
from ingot.cache.pages import PAGE, Pages, Table, joined
from ingot.cache.tail import STEP, TAIL, coded_pages, launch_end, raw_pages


@given(st.integers(0, 20 * STEP))
def test_what_a_token_sees_follows_from_its_place_however_launches_are_cut(length: int) -> None:
    end = launch_end(length)
    assert length < end <= length + STEP + TAIL
    assert coded_pages(end - 1) == coded_pages(length) < coded_pages(end)
    assert length - coded_pages(length) * PAGE < STEP + TAIL
    assert not coded_pages(length) or length - coded_pages(length) * PAGE >= TAIL
    assert (coded_pages(length) + raw_pages(length)) * PAGE >= length


def test_a_raw_form_goes_when_the_last_row_that_sees_it_sees_the_coded_one() -> None:
    pages = Pages(Forms())
    forms = pages.forms
    assert forms is not None
    first = Table(pages)
    first.grow(0, 2 * PAGE)
    second = Table(pages, 0, first.numbers)
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
    again = joined(pages, [kept], 0, 2 * PAGE)
    assert again is not None and again.least == 1 and again.encode(0) == [] and again.coded == 1
    pages.check()


def test_a_page_that_is_read_in_fewer_bits_takes_no_raw_memory_until_somebody_goes_on_inside_of_it() -> None:
    pages = Pages(Forms())
    forms = pages.forms
    assert forms is not None
    table = Table(pages, 1)
    assert list(table.add_coded(2)) == list(table.numbers)
    table.grow(3 * PAGE, 3 * PAGE + 5)
    assert (forms.raw.used, forms.coded.used, forms.raw.made) == (1, 2, 1)
    kept = table.part(PAGE, 3 * PAGE + 5)
    table.release()
    pages.check()
    row = Table(pages, 1, kept.numbers[:2])
    [copy] = row.grow(2 * PAGE + 7, 2 * PAGE + 9)
    assert copy.coded and copy.tokens == 7 and forms.raw.used == 2
    row.release()
    kept.release()
    pages.check()
    assert pages.used == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * PAGE), st.booleans()), max_size=30))
def test_whatever_rows_do_no_slot_is_lost(steps: list[tuple[int, int, bool]]) -> None:
    pages = Pages(Forms())
    rows: dict[int, tuple[Table, int]] = {}
    for number, tokens, leaves in steps:
        table, length = rows.pop(number, (Table(pages), 0))
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
