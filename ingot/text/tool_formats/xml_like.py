"""Keys and values between tags of their own: GLM 4.5 and later, Poolside's models, LongCat, K2 Horizon, Hunyuan 3."""

from __future__ import annotations

import re
from dataclasses import replace

from ingot.text.formats.thinking import HUNYUAN_THINK, IFM_THINK, LONGCAT_THINK, THINK
from ingot.text.tool_formats.format import CallForm, Format, Gap, JsonCall, Maybe, Name, ThinkingFormat
from ingot.text.tool_formats.shapes import element, keys_and_values

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
    model_types=("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "laguna", "bailing_moe_v3", "spark2_5"),
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


IQUEST = Format(
    name="iquest-q1",
    forms=(
        CallForm(
            opening=("<iquest_tool_call>", Gap()),
            call=(Name(), Gap("\n"), keys_and_values("iquest_tool_call")),
        ),
    ),
    thinking=THINK,
    signs=(("<iquest_tool_call>",), ("<|iquest_assistant|>",)),
)

# K2 Horizon: a section of calls, whose arguments may say their types; also JSON in their place.

_IFM = ("<ifm|tool_call>", Gap())
_IFM_TYPES = ("<ifm|arg_type>", "</ifm|arg_type>")
K2_HORIZON = Format(
    name="k2-horizon",
    forms=(
        element(
            "ifm|tool_calls",
            *(*_IFM, Name(), Gap("\n"), keys_and_values("ifm|tool_call", before="ifm|", type_tags=_IFM_TYPES)),
            joint="\n",
            unopened="line",
        ),
        element("ifm|tool_calls", *_IFM, JsonCall(), Gap("\n"), "</ifm|tool_call>", joint="\n", unopened="line"),
    ),
    thinking=IFM_THINK,
    signs=(("<ifm|tool_call",), ("<ifm|think>",)),
    model_types=("k2_horizon",),
)


def _hunyuan(suffix: str, *, separated: bool) -> CallForm:
    """A section of calls, in Hunyuan 3 with a separator behind the name."""
    named = (f"<tool_call{suffix}>", Gap(), Name(), Gap(), Maybe(f"<tool_sep{suffix}>", written=separated), Gap("\n"))
    call = (*named, keys_and_values("tool_call", behind=suffix))
    return element(f"tool_calls{suffix}", *call, joint="\n", unopened="line")


def _suffixed(known: Format, template: str) -> Format:
    """The same with the suffix that a checkpoint gives to every tag."""
    found = re.search(r"<think(:[^\s>'\"{}]+)>", template) or re.search(r"HYTK = '(:[^\s']+)'", template)
    if found is None:
        return known
    suffix = found[1]
    form = _hunyuan(suffix, separated=known is HUNYUAN_V3)
    return replace(
        known, forms=(form, *known.forms), thinking=ThinkingFormat("hunyuan", f"<think{suffix}>", f"</think{suffix}>")
    )


HUNYUAN_V3 = Format(
    name="hunyuan-v3",
    forms=(_hunyuan("", separated=True), _hunyuan(":opensource", separated=True)),
    thinking=THINK,
    signs=(("tool_sep", "arg_key"),),
    model_types=("hy_v3",),
    fitted=_suffixed,
)
HUNYUAN_V3_SUFFIXED = Format(
    name="hunyuan-v3-opensource",
    forms=(_hunyuan(":opensource", separated=True), _hunyuan("", separated=True)),
    thinking=HUNYUAN_THINK,
    signs=(("tool_sep:opensource",), ("tool_sep", "arg_key", ":opensource")),
)
HUNYUAN_V4 = Format(
    name="hunyuan-v4",
    forms=(_hunyuan("", separated=False),),
    thinking=THINK,
    signs=(("<tool_calls", "<arg_key", "<arg_value"),),
    model_types=("hy_v4",),
    fitted=_suffixed,
)
