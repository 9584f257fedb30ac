"""Ids of calls."""

from __future__ import annotations

import re

from ingot.text.parser.events import call_id_maker


def test_each_style_looks_as_its_templates_expect() -> None:
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", call_id_maker("openai")("f", 0))
    assert re.fullmatch(r"[A-Za-z0-9]{9}", call_id_maker("mistral")("f", 0))
    assert call_id_maker("kimi", past_calls=3)("f", 1) == "functions.f:4"


def test_ids_do_not_repeat() -> None:
    make = call_id_maker("openai")
    assert len({make("f", index) for index in range(1000)}) == 1000
