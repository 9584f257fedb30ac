"""MiniMax M2 and M3: a section of invocations with named parameters, and thinking between them."""

from __future__ import annotations

from dataclasses import replace

from ingot.text.formats.thinking import INTERLEAVED_THINK, MINIMAX_M3_THINK
from ingot.text.tool_formats.format import CallForm, Elements, Format, Gap, Name, TagEnd
from ingot.text.tool_formats.shapes import element, named_tags

MINIMAX_M2 = Format(
    name="minimax-m2",
    forms=(element("minimax:tool_call", *named_tags("invoke", "parameter"), joint="\n", unopened="line"),),
    thinking=INTERLEAVED_THINK,
    signs=(("<minimax:tool_call>",),),
    model_types=("minimax", "minimax_m2"),
)
_M3_MARK = "]<]minimax[>["
_M3_FORM = CallForm(
    opening=(f"{_M3_MARK}<tool_call>", Gap("\n")),
    call=(
        f'{_M3_MARK}<invoke name="',
        Name(),
        TagEnd('">', alone=('"/>', '" />')),
        Elements(mark=_M3_MARK, end=f"{_M3_MARK}</invoke>", open_optional=True),
    ),
    joint="\n",
    closing=(Gap("\n"), f"{_M3_MARK}</tool_call>"),
    unopened="anywhere",
)
MINIMAX_M3 = Format(
    name="minimax-m3",
    # The second is what some answers begin with, whose other tags all have the mark.
    forms=(_M3_FORM, replace(_M3_FORM, opening=("<tool_call>", Gap("\n")), unopened="never")),
    thinking=MINIMAX_M3_THINK,
    signs=((_M3_MARK,),),
    model_types=("minimax_m3",),
)
