"""What ends an answer: a number of tokens, with the ways in which clients say that there is none, and texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingot.protocol.schema import bounds
from ingot.protocol.schema.bounds import IntRange
from ingot.protocol.schema.fields import BodyReading, Either, Int, Kind, ListOf, Schema, Text, as_whole
from ingot.protocol.terms import Terms

UNLIMITED: Final = -1
STOP_STRINGS: Final = ListOf(Text(bounds.STOP_STRING_CHARS), bounds.STOP_STRINGS)
STOP: Final = Either((Text(bounds.STOP_STRING_CHARS), STOP_STRINGS))


@dataclass(frozen=True, slots=True)
class Limit(Kind):
    """A number of tokens. -1 is no limit, as null is."""

    bounds: IntRange

    def parse(self, value: object, path: str, reading: BodyReading) -> int | None:
        whole = as_whole(value)
        if whole == UNLIMITED:
            return None
        if whole is None or not self.bounds[0] <= whole <= self.bounds[1]:
            raise self.refuse(value, path, reading)
        return whole

    def schema(self, terms: Terms) -> Schema:
        return {"anyOf": [Int(self.bounds).schema(terms), {"const": UNLIMITED}]}

    def admits(self, value: object) -> bool:
        return as_whole(value) is not None

    def wanted(self, terms: Terms) -> str:
        return f"{Int(self.bounds).wanted(terms)}, or {UNLIMITED} for no limit"


def stop_strings(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """What of `given` can end an answer: an empty text is what some clients send for none."""
    return tuple(text for text in ((given,) if isinstance(given, str) else given) if text)
