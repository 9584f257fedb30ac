"""Granite 3: a marker and an array of calls."""

from __future__ import annotations

from ingot.text.formats.format import CallForm, Format, Gap, JsonCall
from ingot.text.formats.hermes import TAGGED, TAGGED_ARRAY
from ingot.text.formats.thinking import THINK

MARKED_ARRAY = CallForm(
    opening=("<|tool_call|>", Gap(), "[", Gap()),
    call=(JsonCall(),),
    joint=", ",
    closing=(Gap(), "]"),
)

GRANITE = Format(
    name="granite",
    forms=(MARKED_ARRAY, TAGGED_ARRAY, TAGGED),
    thinking=THINK,
    signs=(("<|tool_call|>",),),
    model_types=("granite", "granitemoe", "granitemoeshared"),
)
