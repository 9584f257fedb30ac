"""Families that write calls as function calls.

Python itself: a list in LFM2's markers or Llama's bare, lines in OLMo 3, an action in UI-TARS. Gemma 4 and
FunctionGemma: `call:name{key:value}`, with strings between markers and nothing escaped.
"""

from __future__ import annotations

from ingot.text.tool_formats.format import (
    PYTHON,
    Arguments,
    CallForm,
    Format,
    Gap,
    JsonCall,
    Maybe,
    Name,
    unescaped_notation,
)
from ingot.text.tool_formats.shapes import GEMMA_THINK, THINK, TOOL_CODE, TOOL_CODE_LINE, array_form

_PYTHON_CALL = (Name(), Gap(), Arguments(PYTHON))

_LFM2_END = (Gap(), "<|tool_call_end|>")

LFM2_PYTHON = array_form("<|tool_call_start|>", Gap(), call=_PYTHON_CALL, after=_LFM2_END)
# LFM2 also writes JSON between its markers: where a prompt shows some, or of itself.
LFM2_JSON = CallForm(opening=("<|tool_call_start|>", Gap()), call=(JsonCall(),), closing=_LFM2_END, repeats=True)
LFM2_JSON_ARRAY = array_form("<|tool_call_start|>", Gap(), after=_LFM2_END)
BARE_PYTHON = array_form(call=_PYTHON_CALL, bare=True)
FENCED_PYTHON = array_form("```", Maybe("python"), Gap("\n"), call=_PYTHON_CALL, after=(Gap("\n"), "```"), bare=True)

LFM2 = Format(
    "lfm2",
    (LFM2_PYTHON, LFM2_JSON_ARRAY, LFM2_JSON, BARE_PYTHON, FENCED_PYTHON),
    THINK,
    signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    model_types=("lfm2", "lfm2_moe", "lfm2_vl"),
)
PYTHONIC = Format("pythonic", (BARE_PYTHON, LFM2_PYTHON, FENCED_PYTHON), THINK, signs=(("[func_name1(",),))

OLMO3 = Format(
    "olmo3",
    (
        CallForm(
            opening=("<function_calls>", Gap("\n")),
            call=_PYTHON_CALL,
            joint="\n",
            closing=(Gap("\n"), "</function_calls>"),
        ),
    ),
    THINK,
    signs=(("<function_calls>",),),
    model_types=("olmo3", "olmo_hybrid"),
)

# What it thinks before an action is part of its answer: clients read both.
UI_TARS = Format(
    "ui-tars",
    (CallForm(opening=("Action:", Gap(" ")), call=_PYTHON_CALL, joint="\n\n", bare=True),),
    signs=(("Thought: ...", "Action: ..."),),
)


def _gemma_form(opening: str, quote: str, closing: str) -> CallForm:
    return CallForm(
        opening=(opening, Gap()),
        call=("call:", Name(), Gap(), Arguments(unescaped_notation(quote))),
        closing=(Gap(), closing),
        repeats=True,
        unopened="line",
    )


GEMMA4 = Format(
    "gemma4",
    (_gemma_form("<|tool_call>", '<|"|>', "<tool_call|>"), TOOL_CODE, TOOL_CODE_LINE),
    GEMMA_THINK,
    signs=(("<|tool_call>", "<tool_call|>"),),
    model_types=("gemma4", "gemma4_text"),
)
FUNCTION_GEMMA = Format(
    "function-gemma",
    (_gemma_form("<start_function_call>", "<escape>", "<end_function_call>"), TOOL_CODE),
    signs=(("<start_function_call>",),),
)
