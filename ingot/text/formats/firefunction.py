"""FireFunction 2: a word and an array."""

from __future__ import annotations

from ingot.text.formats.shapes import array
from ingot.text.formats.table import Format

FIREFUNCTION = Format(
    name="firefunction",
    forms=(array("functools", bare=True),),
    signs=(("functools[",),),
)
