"""Invocations with named parameters: dots and MiniCPM 5."""

from __future__ import annotations

from ingot.text.formats.shapes import element, named_tags
from ingot.text.formats.table import CallForm, Format, JsonCall
from ingot.text.formats.thinking import THINK

# dots: a section, each value between lines of its own; also JSON in their place.

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

# MiniCPM 5: functions with no tags around them.

MINICPM5 = Format(
    name="minicpm5",
    forms=(CallForm(call=named_tags("function", "param", gap="", quote=("<![CDATA[", "]]>")), unopened="line"),),
    thinking=THINK,
    signs=(("<function name=", "<param name="),),
    model_types=("minicpm5",),
)
