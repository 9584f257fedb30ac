"""GLM 4.5 and later, and Poolside's models: the name, then keys and values between tags of their own."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, KeyClose, Name, TextParameters
from ingot.text.formats.thinking import THINK

GLM = Format(
    name="glm",
    forms=(
        CallForm(
            opening=("<tool_call>", Gap()),
            call=(
                Name(),
                Gap("\n"),
                TextParameters(
                    key_open="<arg_key>",
                    key_closes=(KeyClose("</arg_key>"),),
                    value_open="<arg_value>",
                    value_close="</arg_value>",
                    end="</tool_call>",
                ),
            ),
        ),
    ),
    thinking=THINK,
    strips=("<|begin_of_box|>", "<|end_of_box|>"),
    signs=(("<arg_key>",),),
    model_types=("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "laguna"),
)
