"""Calls as a Python list: LFM2's between markers, Llama's bare."""

from __future__ import annotations

from ingot.text.formats.notation import PYTHON
from ingot.text.formats.table import Arguments, CallForm, Format, Gap, JsonCall, Maybe, Name
from ingot.text.formats.thinking import THINK

_CALL = (Name(), Gap(), Arguments(PYTHON))

MARKED = CallForm(
    opening=("<|tool_call_start|>", Gap(), "[", Gap()),
    call=_CALL,
    joint=", ",
    closing=(Gap(), "]", Gap(), "<|tool_call_end|>"),
)
# LFM2 also writes JSON between its markers: where a prompt shows some, or of itself.
MARKED_JSON = CallForm(
    opening=("<|tool_call_start|>", Gap()),
    call=(JsonCall(),),
    closing=(Gap(), "<|tool_call_end|>"),
    repeats=True,
)
MARKED_ARRAY = CallForm(
    opening=("<|tool_call_start|>", Gap(), "[", Gap()),
    call=(JsonCall(),),
    joint=", ",
    closing=(Gap(), "]", Gap(), "<|tool_call_end|>"),
)
BARE = CallForm(opening=("[", Gap()), call=_CALL, joint=", ", closing=(Gap(), "]"), bare=True)
FENCED = CallForm(
    opening=("```", Maybe("python"), Gap("\n"), "[", Gap()),
    call=_CALL,
    joint=", ",
    closing=(Gap(), "]", Gap("\n"), "```"),
    bare=True,
)

LFM2 = Format(
    name="lfm2",
    forms=(MARKED, MARKED_ARRAY, MARKED_JSON, BARE, FENCED),
    thinking=THINK,
    signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    model_types=("lfm2", "lfm2_moe", "lfm2_vl"),
)
PYTHONIC = Format(name="pythonic", forms=(BARE, MARKED, FENCED), thinking=THINK, signs=(("[func_name1(",),))
