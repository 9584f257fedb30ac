"""Muse: a section of invocations with named parameters, under a prefix of its own."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, KeyClose, Name, TagEnd, TextParameters
from ingot.text.formats.thinking import THINK

MUSE = Format(
    name="muse",
    forms=(
        CallForm(
            opening=("<atem:function_calls>", Gap("\n")),
            call=(
                '<atem:invoke name="',
                Name(),
                TagEnd('">', alone=('"/>', '" />')),
                Gap("\n"),
                TextParameters(
                    key_open='<atem:parameter name="',
                    key_closes=(KeyClose('">'),),
                    value_close="</atem:parameter>",
                    end="</atem:invoke>",
                ),
            ),
            joint="\n",
            closing=(Gap("\n"), "</atem:function_calls>"),
            unopened="line",
        ),
    ),
    thinking=THINK,
    signs=(("<atem:function_calls>",), ("<atem:invoke",)),
)
