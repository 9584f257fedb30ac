"""GigaChat 3: a message of its own, or behind a marker since 3.1."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, JsonCall

MESSAGE = CallForm(opening=("function call<|role_sep|>", Gap("\n")), call=(JsonCall(),))
MARKED = CallForm(opening=("<|function_call|>", Gap()), call=(JsonCall(),))

GIGACHAT3 = Format(
    name="gigachat3",
    forms=(MESSAGE, MARKED),
    strips=("<|message_sep|>",),
    signs=(("function call", "<|role_sep|>"),),
)
GIGACHAT31 = Format(
    name="gigachat3.1",
    forms=(MARKED, MESSAGE),
    strips=("<|message_sep|>",),
    signs=(("<|function_call|>",),),
)
