"""Seed-OSS: XML calls under tags of its own."""

from __future__ import annotations

from ingot.text.formats.thinking import SEED_THINK
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.shapes import assigned_tags, element

SEED_OSS = Format(
    name="seed-oss",
    forms=(element("seed:tool_call", *assigned_tags(), joint="\n", unopened="line"),),
    thinking=SEED_THINK,
    signs=(("<seed:tool_call>",),),
    model_types=("seed_oss",),
)
