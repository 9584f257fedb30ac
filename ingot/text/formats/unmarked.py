"""Calls without a family's own markers: JSON, bare, in a fence, or between the tags around the tools in the prompt, and
Python in a fence of `tool_code`, as Gemma was shown it.

Models that were shown tools more than they were taught to call them write so: Qwen2.5-Coder does nothing else. All of
it also stands in examples, so a call is one only when it is whole, names a given tool and begins a line.
"""

from __future__ import annotations

from dataclasses import replace

from ingot.text.formats.notation import PYTHON
from ingot.text.tool_formats.format import Arguments, CallForm, Gap, JsonCall, Maybe, Name

_FENCE = ("```", Maybe("json"), Gap("\n"))
_FENCE_END = (Gap("\n"), "```")

BARE = CallForm(call=(JsonCall(),), joint="\n", bare=True, whole=True)
BARE_ARRAY = replace(BARE, opening=("[", Gap()), joint=", ", closing=(Gap(), "]"))
FENCED = replace(BARE, opening=_FENCE, closing=_FENCE_END)
FENCED_ARRAY = replace(BARE_ARRAY, opening=(*_FENCE, *BARE_ARRAY.opening), closing=(*BARE_ARRAY.closing, *_FENCE_END))
FENCED_TAGS = replace(
    BARE,
    opening=("```", Maybe("xml"), Gap("\n"), "<tool_call>", Gap("\n")),
    closing=(Gap("\n"), "</tool_call>", *_FENCE_END),
)
TOOLS_TAGS = replace(BARE, opening=("<tools>", Gap("\n")), closing=(Gap("\n"), "</tools>"))
TOOLS_ARRAY = replace(
    BARE_ARRAY,
    opening=("<tools>", Gap("\n"), *BARE_ARRAY.opening),
    closing=(*BARE_ARRAY.closing, Gap("\n"), "</tools>"),
)
TOOL_CODE = replace(
    BARE,
    opening=("```tool_code", Gap("\n")),
    call=(Maybe("print("), Maybe("default_api."), Name(), Gap(), Arguments(PYTHON), Maybe(")")),
    closing=_FENCE_END,
)

UNMARKED = (BARE, BARE_ARRAY, FENCED, FENCED_ARRAY, FENCED_TAGS, TOOLS_TAGS, TOOLS_ARRAY, TOOL_CODE)
