"""Granite 3: a marker and an array of calls. Granite 20B for function calling: a tag and one call."""

from __future__ import annotations

from ingot.text.formats.hermes import TAGGED, TAGGED_ARRAY
from ingot.text.formats.shapes import array
from ingot.text.formats.table import CallForm, Format, Gap, JsonCall
from ingot.text.formats.thinking import THINK

GRANITE = Format(
    name="granite",
    forms=(array("<|tool_call|>", Gap()), TAGGED_ARRAY, TAGGED),
    thinking=THINK,
    signs=(("<|tool_call|>",),),
    model_types=("granite", "granitemoe", "granitemoeshared"),
)
GRANITE_20B = Format(
    name="granite-20b",
    forms=(CallForm(opening=("<function_call>", Gap(" ")), call=(JsonCall(),), repeats=True),),
    signs=(("<function_call>",),),
)
