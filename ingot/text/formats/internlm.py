"""InternLM 2 and later: a plugin as the action."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, JsonCall
from ingot.text.formats.thinking import THINK

INTERNLM2 = Format(
    name="internlm2",
    forms=(
        CallForm(
            opening=("<|action_start|>", Gap(), "<|plugin|>", Gap("\n")),
            call=(JsonCall("parameters"),),
            closing=(Gap(), "<|action_end|>"),
        ),
    ),
    thinking=THINK,
    signs=(("<|action_start|>",), ("<|plugin|>",)),
    model_types=("internlm2", "internlm3"),
)
