"""Kimi K2: a section of calls, each under an id that holds its name and number."""

from __future__ import annotations

from ingot.text.formats.format import Arguments, CallForm, Format, Gap, Name
from ingot.text.formats.notation import JSON
from ingot.text.formats.thinking import THINK

KIMI_K2 = Format(
    name="kimi-k2",
    forms=(
        CallForm(
            opening=("<|tool_calls_section_begin|>", Gap()),
            call=(
                "<|tool_call_begin|>",
                Gap(),
                Name(numbered=True),
                Gap(),
                "<|tool_call_argument_begin|>",
                Gap(),
                Arguments(JSON),
                Gap(),
                "<|tool_call_end|>",
            ),
            joint="",
            closing=(Gap(), "<|tool_calls_section_end|>"),
            unopened="anywhere",
        ),
    ),
    thinking=THINK,
    ids="kimi",
    signs=(("<|tool_calls_section_begin|>",), ("<|tool_call_begin|>",)),
    model_types=("kimi_k2", "kimi_k25"),
)
