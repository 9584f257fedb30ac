"""Hunyuan 3: a section of calls in the manner of GLM, with a separator behind the name. Some suffix every tag."""

from __future__ import annotations

from ingot.text.formats.shapes import element, keys_and_values
from ingot.text.formats.table import CallForm, Format, Gap, Name
from ingot.text.formats.thinking import HUNYUAN_THINK, THINK


def _form(suffix: str) -> CallForm:
    named = (f"<tool_call{suffix}>", Gap(), Name(), Gap(), f"<tool_sep{suffix}>", Gap("\n"))
    call = (*named, keys_and_values("tool_call", behind=suffix))
    return element(f"tool_calls{suffix}", *call, joint="\n", unopened="line")


HUNYUAN_V3 = Format(
    name="hunyuan-v3",
    forms=(_form(""), _form(":opensource")),
    thinking=THINK,
    signs=(("tool_sep", "arg_key"),),
    model_types=("hy_v3",),
)
HUNYUAN_V3_SUFFIXED = Format(
    name="hunyuan-v3-opensource",
    forms=(_form(":opensource"), _form("")),
    thinking=HUNYUAN_THINK,
    signs=(("tool_sep:opensource",), ("tool_sep", "arg_key", ":opensource")),
)
