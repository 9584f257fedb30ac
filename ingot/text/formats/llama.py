"""Llama 3 and 4: a JSON object, bare or behind a marker, or a tag with JSON inside."""

from __future__ import annotations

from ingot.text.formats.notation import JSON
from ingot.text.formats.unmarked import FENCED, FENCED_ARRAY
from ingot.text.tool_formats.format import Arguments, CallForm, Format, Gap, JsonCall, Name

BARE = CallForm(call=(JsonCall("parameters"),), joint="; ", bare=True)
PYTHON_TAG = CallForm(opening=("<|python_tag|>", Gap()), call=(JsonCall("parameters"),), joint="; ")
FUNCTION_TAG = CallForm(
    call=("<function=", Name(), ">", Gap(), Arguments(JSON), Gap(), "</function>"),
    unopened="line",
)

LLAMA = Format(
    name="llama",
    forms=(BARE, PYTHON_TAG, FUNCTION_TAG, FENCED, FENCED_ARRAY),
    strips=("<|eom_id|>",),
    signs=(("<|python_tag|>",), ('"parameters": dictionary',)),
    model_types=("llama", "llama4", "mllama"),
)
