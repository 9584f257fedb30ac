"""Who may guess ahead for a request: what is read, what is refused, and that the schema says the same."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadRequest
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.schema.model_fields import ProposersField
from ingot.protocol.terms import Terms

OFFERED = ("forced", "lookup", "mtp")
ASKED = st.lists(st.sampled_from(["auto", "off", "draft", "draft:a/b", "", " mtp", *OFFERED]), max_size=4)


def read(value: Any, offered: tuple[str, ...] = OFFERED) -> Any:
    return ProposersField().parse(value, "speculate", BodyReading(Terms((), 1, 1.0, proposers=offered)))


def refusal(value: Any, offered: tuple[str, ...] = OFFERED) -> str:
    with pytest.raises(BadRequest) as caught:
        read(value, offered)
    assert caught.value.param == "speculate"
    return caught.value.message


def test_auto_is_all_and_off_is_none_whatever_is_offered() -> None:
    assert read("auto") is read("auto", ()) is None
    assert read("off") == read("off", ()) == ()


def test_names_come_once_in_the_order_given() -> None:
    assert read("mtp,forced") == ("mtp", "forced")
    assert read("lookup,mtp,lookup") == ("lookup", "mtp")


@pytest.mark.parametrize("value", ["draft", "draft:a/b", "mtp,", "mtp, lookup", "auto,mtp", "off,mtp", "ngram", ""])
def test_what_is_not_offered_is_refused_with_what_is(value: str) -> None:
    assert 'expected "auto", "off", or some of forced, lookup, mtp, joined by commas' in refusal(value)
    assert 'expected "auto" or "off"' in refusal(value, ())


@pytest.mark.parametrize("value", [True, 3, ["mtp"], {"method": "mtp"}, ",".join(["mtp"] * 1000)])
def test_what_is_no_text_of_that_kind_is_refused(value: Any) -> None:
    assert refusal(value).startswith("speculate: expected")


@given(ASKED.map(",".join) | st.text(max_size=12), st.sampled_from([OFFERED, ("lookup",), ()]))
def test_the_schema_takes_what_is_read_and_nothing_else(value: str, offered: tuple[str, ...]) -> None:
    schema = ProposersField().schema(Terms((), 1, 1.0, proposers=offered))
    try:
        read(value, offered)
    except BadRequest:
        # JSON Schema's $ is the end of the text, which Python's is not: it lets a newline pass.
        assert not jsonschema.Draft202012Validator(schema).is_valid(value) or value.endswith("\n")
    else:
        jsonschema.validate(value, schema)
    assert "pattern" not in schema or re.compile(schema["pattern"])
