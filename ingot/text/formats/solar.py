"""Solar Open: each call under an id, its name and arguments behind markers of their own."""

from __future__ import annotations

from ingot.text.formats.notation import JSON
from ingot.text.formats.table import Arguments, CallForm, CallId, Format, Gap, Name
from ingot.text.formats.thinking import SOLAR_THINK

SOLAR_OPEN = Format(
    name="solar-open",
    forms=(
        CallForm(
            opening=("<|tool_calls|>", Gap()),
            call=(
                "<|tool_call:begin|>",
                CallId(""),
                "<|tool_call:name|>",
                Name(),
                "<|tool_call:args|>",
                Gap(),
                Arguments(JSON),
                Gap(),
                "<|tool_call:end|>",
            ),
            joint="",
            closing=(Gap(), "<|calls|>"),
            unopened="anywhere",
        ),
    ),
    thinking=SOLAR_THINK,
    strips=("<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>"),
    signs=(("<|tool_call:begin|>",),),
    model_types=("solar_open",),
)
