"""dots: a section of invocations, each value between lines of its own; also JSON in their place."""

from __future__ import annotations

from ingot.text.formats.shapes import element, named_tags
from ingot.text.formats.table import Format, JsonCall
from ingot.text.formats.thinking import THINK

DOTS = Format(
    name="dots",
    forms=(
        element("dots_function_call", *named_tags("invoke", "parameter", frame="\n"), joint="\n"),
        element("dots_function_call", JsonCall(), repeats=True),
    ),
    thinking=THINK,
    signs=(("<dots_function_call>",),),
    model_types=("dots1", "dots3_note"),
)
