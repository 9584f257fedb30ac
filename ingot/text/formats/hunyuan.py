"""Hunyuan 3: a section of calls in the manner of GLM, with a separator behind the name. Some suffix every tag."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, KeyClose, Name, TextParameters
from ingot.text.formats.thinking import HUNYUAN_THINK, THINK


def _form(suffix: str) -> CallForm:
    return CallForm(
        opening=(f"<tool_calls{suffix}>", Gap("\n")),
        call=(
            f"<tool_call{suffix}>",
            Gap(),
            Name(),
            Gap(),
            f"<tool_sep{suffix}>",
            Gap("\n"),
            TextParameters(
                key_open=f"<arg_key{suffix}>",
                key_closes=(KeyClose(f"</arg_key{suffix}>"),),
                value_open=f"<arg_value{suffix}>",
                value_close=f"</arg_value{suffix}>",
                end=f"</tool_call{suffix}>",
            ),
        ),
        joint="\n",
        closing=(Gap("\n"), f"</tool_calls{suffix}>"),
        unopened="line",
    )


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
