"""FireFunction 2: a word and an array."""

from __future__ import annotations

from ingot.text.formats.table import CallForm, Format, Gap, JsonCall

FIREFUNCTION = Format(
    name="firefunction",
    forms=(
        CallForm(
            opening=("functools", "[", Gap()),
            call=(JsonCall(),),
            joint=", ",
            closing=(Gap(), "]"),
            bare=True,
        ),
    ),
    signs=(("functools[",),),
)
