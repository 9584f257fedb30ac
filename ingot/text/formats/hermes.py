"""Hermes: a JSON object between tags. Also what models without a tool format of their own are taught."""

from __future__ import annotations

from ingot.text.formats.thinking import KIMI_VL_THINK, THINK
from ingot.text.formats.unmarked import UNMARKED
from ingot.text.tool_formats.format import Format, Gap, JsonCall
from ingot.text.tool_formats.shapes import array, element

TAGGED = element("tool_call", JsonCall())
# The same tags around an array, as small models like to write.
TAGGED_ARRAY = array("<tool_call>", Gap("\n"), after=(Gap("\n"), "</tool_call>"))

HERMES = Format(
    name="hermes",
    forms=(TAGGED, TAGGED_ARRAY, *UNMARKED),
    thinking=THINK,
    signs=(("<tool_call>",),),
)
ERNIE = Format(
    name="ernie4.5",
    forms=HERMES.forms,
    thinking=THINK,
    strips=("<response>", "</response>"),
    signs=(("<response>", "<tool_call>"),),
    model_types=("ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl"),
)
KIMI_VL = Format(
    name="kimi-vl",
    forms=HERMES.forms,
    thinking=KIMI_VL_THINK,
    signs=((KIMI_VL_THINK.open,),),
    model_types=("kimi_vl",),
)
