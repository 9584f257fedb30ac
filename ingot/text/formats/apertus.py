"""Apertus: an array of objects, each of which has the name of its function as its only key."""

from __future__ import annotations

from ingot.text.formats.notation import JSON
from ingot.text.formats.shapes import array
from ingot.text.formats.table import Arguments, Format, Gap, Name
from ingot.text.formats.thinking import APERTUS_THINK

APERTUS = Format(
    name="apertus",
    forms=(
        array(
            *("<|tools_prefix|>", Gap()),
            call=('{"', Name(), '":', Gap(" "), Arguments(JSON), Gap(), "}"),
            after=(Gap(), "<|tools_suffix|>"),
        ),
    ),
    thinking=APERTUS_THINK,
    signs=(("<|tools_prefix|>",),),
    model_types=("apertus",),
)
