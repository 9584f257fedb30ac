"""Seed-OSS: XML calls under tags of its own."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, KeyClose, Name, TagEnd, TextParameters
from ingot.text.formats.thinking import SEED_THINK

SEED_OSS = Format(
    name="seed-oss",
    forms=(
        CallForm(
            opening=("<seed:tool_call>", Gap("\n")),
            call=(
                "<function=",
                Name(),
                TagEnd(">"),
                Gap("\n"),
                TextParameters(
                    key_open="<parameter=",
                    key_closes=(KeyClose(">"),),
                    value_close="</parameter>",
                    end="</function>",
                ),
            ),
            joint="\n",
            closing=(Gap("\n"), "</seed:tool_call>"),
            unopened="line",
        ),
    ),
    thinking=SEED_THINK,
    signs=(("<seed:tool_call>",),),
    model_types=("seed_oss",),
)
