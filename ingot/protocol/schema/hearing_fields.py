"""The kinds of fields whose bounds a model that hears sets."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.media.languages import LANGUAGES
from ingot.protocol.model_names import is_name, names_schema, unknown_name
from ingot.protocol.schema.fields import BodyReading, Kind, OneOf, Schema
from ingot.protocol.schema.model_name import ModelName
from ingot.protocol.terms import Terms


@dataclass(frozen=True, slots=True)
class HearingName(Kind):
    """A name of the model that hears. Any other is a 404 that lists what there is."""

    types, words = (str,), ModelName.words

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str):
            raise self.refuse(value, path, reading)
        if not is_name(value, reading.terms.hearing.models):
            raise unknown_name(value, reading.terms.hearing.models)
        return value

    def schema(self, terms: Terms) -> Schema:
        return names_schema(terms.hearing.models) if terms.hearing.models else {"type": "string"}


@dataclass(frozen=True, slots=True)
class Language(Kind):
    """A language that the model hears, by its code or its English name."""

    types = (str,)

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        known = reading.terms.hearing.languages
        named = {LANGUAGES[code]: code for code in known if code in LANGUAGES}
        said = value.lower() if isinstance(value, str) else value
        if isinstance(said, str) and said in named:
            return named[said]
        return OneOf(known).parse(said, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return OneOf(terms.hearing.languages).schema(terms) if terms.hearing.languages else {"type": "string"}

    def wanted(self, terms: Terms) -> str:
        return OneOf(terms.hearing.languages).wanted(terms)


@dataclass(frozen=True, slots=True)
class File(Kind):
    """A file in a form."""

    types, words = (bytes,), "a file"

    def parse(self, value: object, path: str, reading: BodyReading) -> bytes:
        if not isinstance(value, bytes):
            raise self.refuse(value, path, reading)
        return value

    def schema(self, terms: Terms) -> Schema:
        return {"type": "string", "format": "binary"}
