"""Muse: a section of invocations with named parameters, under a prefix of its own."""

from __future__ import annotations

from ingot.text.formats.shapes import element, named_tags
from ingot.text.formats.table import Format
from ingot.text.formats.thinking import THINK

MUSE = Format(
    name="muse",
    forms=(element("atem:function_calls", *named_tags("atem:invoke", "atem:parameter"), joint="\n", unopened="line"),),
    thinking=THINK,
    signs=(("<atem:function_calls>",), ("<atem:invoke",)),
)
