"""JSON between `tool_calls` tags: an array in Hunyuan A13B, Jamba and Apriel, lines in MiniMax M1."""

from __future__ import annotations

from ingot.text.formats.shapes import array, element
from ingot.text.formats.table import Format, Gap, JsonCall
from ingot.text.formats.thinking import APRIEL_THINK, THINK

ARRAY = array("<tool_calls>", Gap(), after=(Gap(), "</tool_calls>"))
LINES = element("tool_calls", JsonCall(), joint="\n")

HUNYUAN_A13B = Format(
    name="hunyuan-a13b",
    forms=(ARRAY, LINES),
    thinking=THINK,
    strips=("<answer>", "</answer>"),
    signs=(("<tool_calls>", "<answer>"),),
    model_types=("hunyuan_v1_moe", "hunyuan_v1_dense", "hunyuan"),
)
APRIEL = Format(
    name="apriel",
    forms=(ARRAY, LINES),
    thinking=APRIEL_THINK,
    strips=("[END FINAL RESPONSE]",),
    signs=(("<tool_calls>", "[BEGIN FINAL RESPONSE]"),),
    model_types=("apriel",),
)
MINIMAX_M1 = Format(
    name="minimax-m1",
    forms=(LINES, ARRAY),
    thinking=THINK,
    signs=(("<tool_calls>", "<beginning_of_sentence>"),),
    model_types=("minimax_m1", "minimax_text_01"),
)
JAMBA = Format(
    name="jamba",
    forms=(ARRAY, LINES),
    thinking=THINK,
    signs=(("<tool_calls>",),),
    model_types=("jamba",),
)
