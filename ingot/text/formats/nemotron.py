"""Nemotron Nano 2: an array between tags in capitals."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, JsonCall
from ingot.text.formats.thinking import THINK

NEMOTRON_NANO = Format(
    name="nemotron-nano-v2",
    forms=(
        CallForm(
            opening=("<TOOLCALL>", Gap(), "[", Gap()),
            call=(JsonCall(),),
            joint=", ",
            closing=(Gap(), "]", Gap(), "</TOOLCALL>"),
        ),
    ),
    thinking=THINK,
    signs=(("<TOOLCALL>",),),
)
