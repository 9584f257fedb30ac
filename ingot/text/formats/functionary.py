"""Functionary: every message names its recipient, which is `all` for an answer and else a function."""

from __future__ import annotations

from ingot.text.formats.llama import FUNCTION_TAG
from ingot.text.formats.notation import JSON
from ingot.text.tool_formats.format import Arguments, CallForm, Format, Gap, Name

RECIPIENT = CallForm(
    opening=("<|recipient|>", Gap()),
    call=(Name(), Gap("\n"), "<|content|>", Gap(), Arguments(JSON)),
    opening_in_prompt=True,
)

# 3.2 has one short marker, which the prompt ends with.
ARROWS = CallForm(
    opening=(">>>",),
    call=(Name(), "\n", Gap(), Arguments(JSON)),
    opening_in_prompt=True,
    bare=True,
)

FUNCTIONARY32 = Format(
    name="functionary-3.2",
    forms=(ARROWS, FUNCTION_TAG),
    heads=(">>>all\n", "all\n"),
    signs=((">>>all",), (">>>", "recipient")),
)
FUNCTIONARY = Format(
    name="functionary",
    forms=(RECIPIENT, FUNCTION_TAG),
    strips=("<|recipient|>all\n<|content|>", "all\n<|content|>", "<|from|>assistant\n", "<|stop|>"),
    signs=(("<|recipient|>", "<|content|>"),),
)
