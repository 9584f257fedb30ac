from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ingot.errors import BadRequest
from ingot.protocol.schema.rules import Given, Is, Never, Not

objects = st.dictionaries(
    st.sampled_from("abc"), st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, 2, "", "x", [], {}]), max_size=3
)
conditions = st.recursive(
    st.one_of(
        st.builds(Given, st.sampled_from("abc")), st.builds(Is, st.sampled_from("abc"), st.sampled_from([True, 0]))
    ),
    lambda inner: st.builds(Not, inner),
    max_leaves=3,
)
rules = st.lists(conditions, min_size=1, max_size=3).map(lambda made: Never(tuple(made), "No.", param="a"))


@given(rules, objects)
@example(Never((Is("a", 0),), "No.", param="a"), {"a": False})
@example(Never((Is("a", True),), "No.", param="a"), {"a": 1})
def test_a_rule_and_its_schema_agree_on_every_object(rule: Never, value: dict[str, Any]) -> None:
    try:
        rule.judge(value)
        taken = True
    except BadRequest as error:
        assert (error.message, error.param) == ("No.", "a")
        taken = False
    assert taken == jsonschema_rs.is_valid(rule.schema(), value)


def test_a_rule_needs_all_its_conditions() -> None:
    rule = Never((Given("a"), Not(Is("b", True))), "a needs b.", param="a")
    rule.judge({"a": 1, "b": True})
    rule.judge({"b": False})
    with pytest.raises(BadRequest, match="a needs b"):
        rule.judge({"a": 1})
