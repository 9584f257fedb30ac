"""Gemma 4 and FunctionGemma: `call:name{key:value}`, with strings between markers and nothing escaped."""

from __future__ import annotations

from ingot.text.formats.notation import unescaped
from ingot.text.formats.thinking import GEMMA_THINK
from ingot.text.formats.unmarked import TOOL_CODE
from ingot.text.tool_formats.format import Arguments, CallForm, Format, Gap, Name


def _form(opening: str, quote: str, closing: str) -> CallForm:
    return CallForm(
        opening=(opening, Gap()),
        call=("call:", Name(), Gap(), Arguments(unescaped(quote))),
        closing=(Gap(), closing),
        repeats=True,
        unopened="line",
    )


GEMMA4 = Format(
    name="gemma4",
    forms=(_form("<|tool_call>", '<|"|>', "<tool_call|>"), TOOL_CODE),
    thinking=GEMMA_THINK,
    signs=(("<|tool_call>", "<tool_call|>"),),
    model_types=("gemma4", "gemma4_text"),
)
FUNCTION_GEMMA = Format(
    name="function-gemma",
    forms=(_form("<start_function_call>", "<escape>", "<end_function_call>"), TOOL_CODE),
    signs=(("<start_function_call>",),),
)
