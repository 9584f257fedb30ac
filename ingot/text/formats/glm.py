"""Keys and values between tags of their own: GLM 4.5 and later, Poolside's models, LongCat, Hunyuan 3."""

from __future__ import annotations

from ingot.text.formats.shapes import element, keys_and_values
from ingot.text.formats.table import CallForm, Format, Gap, JsonCall, Name
from ingot.text.formats.thinking import HUNYUAN_THINK, LONGCAT_THINK, THINK

GLM = Format(
    name="glm",
    forms=(
        CallForm(
            opening=("<tool_call>", Gap()),
            call=(Name(), Gap("\n"), keys_and_values("tool_call")),
        ),
    ),
    thinking=THINK,
    strips=("<|begin_of_box|>", "<|end_of_box|>"),
    signs=(("<arg_key>",),),
    model_types=("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "laguna"),
)
LONGCAT = Format(
    name="longcat",
    forms=(
        CallForm(
            opening=("<longcat_tool_call>", Gap()),
            call=(Name(), Gap("\n"), keys_and_values("longcat_tool_call", before="longcat_")),
        ),
        element("longcat_tool_call", JsonCall()),
    ),
    thinking=LONGCAT_THINK,
    signs=(("<longcat_tool_call>",),),
    model_types=("longcat_flash", "longcat_flash_ngram"),
)


def _hunyuan(suffix: str) -> CallForm:
    """A section of calls, with a separator behind the name. Some suffix every tag."""
    named = (f"<tool_call{suffix}>", Gap(), Name(), Gap(), f"<tool_sep{suffix}>", Gap("\n"))
    call = (*named, keys_and_values("tool_call", behind=suffix))
    return element(f"tool_calls{suffix}", *call, joint="\n", unopened="line")


HUNYUAN_V3 = Format(
    name="hunyuan-v3",
    forms=(_hunyuan(""), _hunyuan(":opensource")),
    thinking=THINK,
    signs=(("tool_sep", "arg_key"),),
    model_types=("hy_v3",),
)
HUNYUAN_V3_SUFFIXED = Format(
    name="hunyuan-v3-opensource",
    forms=(_hunyuan(":opensource"), _hunyuan("")),
    thinking=HUNYUAN_THINK,
    signs=(("tool_sep:opensource",), ("tool_sep", "arg_key", ":opensource")),
)
