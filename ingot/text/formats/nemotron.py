"""Nemotron Nano 2: an array between tags in capitals."""

from __future__ import annotations

from ingot.text.formats.shapes import array
from ingot.text.formats.table import Format, Gap
from ingot.text.formats.thinking import THINK

NEMOTRON_NANO = Format(
    name="nemotron-nano-v2",
    forms=(array("<TOOLCALL>", Gap(), after=(Gap(), "</TOOLCALL>")),),
    thinking=THINK,
    signs=(("<TOOLCALL>",),),
)
