"""Functionary: every message names its recipient, which is `all` for an answer and else a function."""

from __future__ import annotations

from ingot.text.formats.format import Arguments, CallForm, Format, Gap, Name
from ingot.text.formats.llama import FUNCTION_TAG
from ingot.text.formats.notation import JSON

RECIPIENT = CallForm(
    opening=("<|recipient|>", Gap()),
    call=(Name(), Gap("\n"), "<|content|>", Gap(), Arguments(JSON)),
    opening_in_prompt=True,
)

FUNCTIONARY = Format(
    name="functionary",
    forms=(RECIPIENT, FUNCTION_TAG),
    strips=("<|recipient|>all\n<|content|>", "all\n<|content|>", "<|from|>assistant\n", "<|stop|>"),
    signs=(("<|recipient|>", "<|content|>"),),
)
