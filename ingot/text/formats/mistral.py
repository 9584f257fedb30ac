"""Mistral: one marker before an array of calls or, since its eleventh tokenizer, before each call."""

from __future__ import annotations

from ingot.text.formats.notation import JSON
from ingot.text.formats.thinking import MISTRAL_THINK
from ingot.text.tool_formats.format import Arguments, CallForm, CallId, Format, Gap, Maybe, Name
from ingot.text.tool_formats.shapes import array

ARRAY = array("[TOOL_CALLS]", Gap(" "))
NAMED = CallForm(
    opening=("[TOOL_CALLS]", Gap()),
    call=(Name(), CallId("[CALL_ID]"), Maybe("[ARGS]", written=True), Gap(), Arguments(JSON)),
)

MISTRAL = Format(
    name="mistral",
    forms=(ARRAY, NAMED),
    thinking=MISTRAL_THINK,
    ids="mistral",
    signs=(("[TOOL_CALLS]",),),
    model_types=("mistral", "mixtral", "mistral3", "pixtral"),
)
MISTRAL_NAMED = Format(
    name="mistral-args",
    forms=(NAMED, ARRAY),
    thinking=MISTRAL_THINK,
    ids="mistral",
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    model_types=("ministral3", "mistral4"),
)
