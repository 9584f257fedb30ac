"""Command R7B, A and their kin: an action that is an array of calls, and a response between markers."""

from __future__ import annotations

from ingot.text.formats.thinking import COHERE_THINK
from ingot.text.tool_formats.format import Format, Gap, JsonCall
from ingot.text.tool_formats.shapes import array

COHERE = Format(
    name="cohere",
    forms=(
        array(
            *("<|START_ACTION|>", Gap()),
            call=(JsonCall("parameters", "tool_name"),),
            after=(Gap(), "<|END_ACTION|>"),
        ),
    ),
    thinking=COHERE_THINK,
    strips=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    signs=(("<|START_ACTION|>",),),
    model_types=("cohere2", "cohere2_moe", "cohere2_vision"),
)
