"""dots: a section of invocations, each value between lines of its own; also JSON in their place."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, JsonCall, KeyClose, Name, TagEnd, TextParameters
from ingot.text.formats.thinking import THINK

DOTS = Format(
    name="dots",
    forms=(
        CallForm(
            opening=("<dots_function_call>", Gap("\n")),
            call=(
                '<invoke name="',
                Name(),
                TagEnd('">', alone=('"/>', '" />')),
                Gap("\n"),
                TextParameters(
                    key_open='<parameter name="',
                    key_closes=(KeyClose('">'),),
                    value_close="</parameter>",
                    end="</invoke>",
                    frame="\n",
                ),
            ),
            joint="\n",
            closing=(Gap("\n"), "</dots_function_call>"),
        ),
        CallForm(
            opening=("<dots_function_call>", Gap("\n")),
            call=(JsonCall(),),
            closing=(Gap("\n"), "</dots_function_call>"),
            repeats=True,
        ),
    ),
    thinking=THINK,
    signs=(("<dots_function_call>",),),
    model_types=("dots1", "dots3_note"),
)
