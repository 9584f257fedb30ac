"""GLM 4.5 and later, and Poolside's models: the name, then keys and values between tags of their own."""

from __future__ import annotations

from ingot.text.formats.shapes import keys_and_values
from ingot.text.formats.table import CallForm, Format, Gap, Name
from ingot.text.formats.thinking import THINK

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
