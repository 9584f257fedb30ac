"""Apertus: an array of objects, each of which has the name of its function as its only key."""

from __future__ import annotations

from ingot.text.formats.notation import JSON
from ingot.text.formats.table import Arguments, CallForm, Format, Gap, Name
from ingot.text.formats.thinking import APERTUS_THINK

APERTUS = Format(
    name="apertus",
    forms=(
        CallForm(
            opening=("<|tools_prefix|>", Gap(), "[", Gap()),
            call=('{"', Name(), '":', Gap(" "), Arguments(JSON), Gap(), "}"),
            joint=", ",
            closing=(Gap(), "]", Gap(), "<|tools_suffix|>"),
        ),
    ),
    thinking=APERTUS_THINK,
    signs=(("<|tools_prefix|>",),),
    model_types=("apertus",),
)
