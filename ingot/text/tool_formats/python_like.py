"""Calls in Python: a list in LFM2's markers or Llama's bare, lines in OLMo 3, an action in UI-TARS."""

from __future__ import annotations

from ingot.text.formats.notation import PYTHON
from ingot.text.formats.thinking import THINK
from ingot.text.tool_formats.format import Arguments, CallForm, Format, Gap, JsonCall, Maybe, Name
from ingot.text.tool_formats.shapes import array

_CALL = (Name(), Gap(), Arguments(PYTHON))

_END = (Gap(), "<|tool_call_end|>")

MARKED = array("<|tool_call_start|>", Gap(), call=_CALL, after=_END)
# LFM2 also writes JSON between its markers: where a prompt shows some, or of itself.
MARKED_JSON = CallForm(opening=("<|tool_call_start|>", Gap()), call=(JsonCall(),), closing=_END, repeats=True)
MARKED_ARRAY = array("<|tool_call_start|>", Gap(), after=_END)
BARE = array(call=_CALL, bare=True)
FENCED = array("```", Maybe("python"), Gap("\n"), call=_CALL, after=(Gap("\n"), "```"), bare=True)

LFM2 = Format(
    name="lfm2",
    forms=(MARKED, MARKED_ARRAY, MARKED_JSON, BARE, FENCED),
    thinking=THINK,
    signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    model_types=("lfm2", "lfm2_moe", "lfm2_vl"),
)
PYTHONIC = Format(name="pythonic", forms=(BARE, MARKED, FENCED), thinking=THINK, signs=(("[func_name1(",),))

OLMO3 = Format(
    name="olmo3",
    forms=(
        CallForm(
            opening=("<function_calls>", Gap("\n")),
            call=_CALL,
            joint="\n",
            closing=(Gap("\n"), "</function_calls>"),
        ),
    ),
    thinking=THINK,
    signs=(("<function_calls>",),),
    model_types=("olmo3", "olmo_hybrid"),
)

# What it thinks before an action is part of its answer: clients read both.
UI_TARS = Format(
    name="ui-tars",
    forms=(CallForm(opening=("Action:", Gap(" ")), call=_CALL, joint="\n\n", bare=True),),
    signs=(("Thought: ...", "Action: ..."),),
)
