"""Ids of calls."""

from __future__ import annotations

import re

from ingot.text.parse.call_ids import id_maker


def test_each_style_looks_as_its_templates_expect() -> None:
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", id_maker("openai")("f", 0))
    assert re.fullmatch(r"[A-Za-z0-9]{9}", id_maker("mistral")("f", 0))
    assert id_maker("kimi", past_calls=3)("f", 1) == "functions.f:4"


def test_ids_do_not_repeat() -> None:
    make = id_maker("openai")
    assert len({make("f", index) for index in range(1000)}) == 1000
