"""MiniMax M2: a section of invocations with named parameters, and thinking between them."""

from __future__ import annotations

from ingot.text.formats.format import CallForm, Format, Gap, KeyClose, Name, TagEnd, TextParameters
from ingot.text.formats.thinking import INTERLEAVED_THINK, MINIMAX_M3_THINK

MINIMAX_M2 = Format(
    name="minimax-m2",
    forms=(
        CallForm(
            opening=("<minimax:tool_call>", Gap("\n")),
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
                ),
            ),
            joint="\n",
            closing=(Gap("\n"), "</minimax:tool_call>"),
            unopened="line",
        ),
    ),
    thinking=INTERLEAVED_THINK,
    signs=(("<minimax:tool_call>",),),
    model_types=("minimax", "minimax_m2"),
)
# M3 writes nested values as elements of their own, which no table here can say: its calls stay text.
MINIMAX_M3 = Format(
    name="minimax-m3",
    thinking=MINIMAX_M3_THINK,
    signs=(("]<]minimax[>[",),),
    model_types=("minimax_m3",),
)
