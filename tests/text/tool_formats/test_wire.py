"""What models write is read as it is meant, however it is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import FORMATS, format_by_name
from tests.text.parser.answers import check_order, cut, parsed, summary
from tests.text.tool_formats.cases import CASES
from tests.text.tool_formats.wire import Case


def test_every_format_has_cases() -> None:
    assert {case.format for case in CASES} == {table.name for table in FORMATS}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_answer_means_what_it_says(case: Case) -> None:
    events = parsed(format_by_name(case.format), [case.text], thinking=case.thinking)
    check_order(events)
    assert summary(events) == case.means


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_answer_means_the_same_cut_anywhere(case: Case) -> None:
    format = format_by_name(case.format)
    whole = parsed(format, [case.text], thinking=case.thinking)
    assert parsed(format, case.text, thinking=case.thinking) == whole
    for offset in range(1, len(case.text)):
        assert parsed(format, cut(case.text, [offset]), thinking=case.thinking) == whole


@given(case=st.sampled_from(CASES), data=st.data())
def test_an_answer_means_the_same_in_any_pieces(case: Case, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(case.text))))
    format = format_by_name(case.format)
    whole = parsed(format, [case.text], thinking=case.thinking)
    assert parsed(format, cut(case.text, cuts), thinking=case.thinking) == whole


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_without_tools_nothing_is_a_call(format: Format) -> None:
    for case in CASES:
        if case.format == format.name:
            events = parsed(format, [case.text], tools=(), thinking=case.thinking)
            assert all(kind in ("thinks", "says") for kind, *_ in summary(events)), str(case)
