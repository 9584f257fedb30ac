"""The kind of fields that are hints: taken without effect, since nothing depends on them, and named in the receipt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.errors import Unsupported
from ingot.protocol.schema.fields import BodyReading, Kind, OneOf, Schema
from ingot.protocol.terms import Terms


def note(path: str, reading: BodyReading) -> None:
    """Names in the receipt what has no effect; a strict server refuses it."""
    if reading.terms.strict:
        raise Unsupported(f"{path} has no effect here, and this server is strict.", param=path)
    if not reading.knows_ignored(path):
        reading.ignore(path)


@dataclass(frozen=True, slots=True)
class Unheeded(Kind):
    """Any object."""

    types, words = (dict,), "an object"

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        note(path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"enum": [None]} if terms.strict else {"type": "object"}


@dataclass(frozen=True, slots=True, init=False)
class Passed(Kind):
    """Anything. What is not `harmless` asks for something that has no effect here."""

    harmless: tuple[Any, ...]

    def __init__(self, *harmless: Any) -> None:
        object.__setattr__(self, "harmless", harmless)

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        if not any(type(value) is type(free) and value == free for free in self.harmless):
            note(path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"enum": list(self.harmless) or [None]} if terms.strict else {}


@dataclass(frozen=True, slots=True)
class UnheededWord(Kind):
    """One of a few words. Those that are not `harmless` ask for something that has no effect here."""

    types = (str,)
    values: tuple[str, ...]
    harmless: tuple[str, ...] = ()

    def parse(self, value: object, path: str, reading: BodyReading) -> None:
        word = OneOf(self.values).parse(value, path, reading)
        if word in self.harmless:
            return
        note(path, reading)

    def schema(self, terms: Terms) -> Schema:
        return OneOf(self.harmless if terms.strict else self.values).schema(terms)

    def wanted(self, terms: Terms) -> str:
        return OneOf(self.values).wanted(terms)
