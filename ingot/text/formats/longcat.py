"""LongCat: keys and values between tags of their own, in the manner of GLM."""

from __future__ import annotations

from ingot.text.formats.shapes import element, keys_and_values
from ingot.text.formats.table import CallForm, Format, Gap, JsonCall, Name
from ingot.text.formats.thinking import LONGCAT_THINK

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
