"""LongCat: keys and values between tags of their own, in the manner of GLM."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, JsonCall, KeyClose, Name, TextParameters
from ingot.text.formats.thinking import LONGCAT_THINK

LONGCAT = Format(
    name="longcat",
    forms=(
        CallForm(
            opening=("<longcat_tool_call>", Gap()),
            call=(
                Name(),
                Gap("\n"),
                TextParameters(
                    key_open="<longcat_arg_key>",
                    key_closes=(KeyClose("</longcat_arg_key>"),),
                    value_open="<longcat_arg_value>",
                    value_close="</longcat_arg_value>",
                    end="</longcat_tool_call>",
                ),
            ),
        ),
        CallForm(
            opening=("<longcat_tool_call>", Gap("\n")),
            call=(JsonCall(),),
            closing=(Gap("\n"), "</longcat_tool_call>"),
        ),
    ),
    thinking=LONGCAT_THINK,
    signs=(("<longcat_tool_call>",),),
    model_types=("longcat_flash", "longcat_flash_ngram"),
)
