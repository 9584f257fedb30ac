"""The kinds of fields whose bounds a model that speaks sets."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.protocol.model_names import is_name, names_schema, unknown_name
from ingot.protocol.schema.fields import BodyReading, Kind, OneOf, Schema
from ingot.protocol.schema.model_name import ModelName
from ingot.protocol.terms import Terms


@dataclass(frozen=True, slots=True)
class SpeakingName(Kind):
    """A name of the model that speaks. Any other is a 404 that lists what there is."""

    types, words = (str,), ModelName.words

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str):
            raise self.refuse(value, path, reading)
        if not is_name(value, reading.terms.speaking.models):
            raise unknown_name(value, reading.terms.speaking.models)
        return value

    def schema(self, terms: Terms) -> Schema:
        return names_schema(terms.speaking.models) if terms.speaking.models else {"type": "string"}


@dataclass(frozen=True, slots=True)
class Voice(Kind):
    """A voice by its name, or by what stands behind the underscore in it, where that is one voice alone."""

    types = (str,)

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        known = reading.terms.speaking.voices
        if isinstance(value, str) and value not in known:
            meant = [voice for voice in known if voice.partition("_")[2] == value]
            if len(meant) == 1:
                return meant[0]
        return OneOf(known).parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"type": "string", "examples": list(terms.speaking.voices)}

    def wanted(self, terms: Terms) -> str:
        return OneOf(terms.speaking.voices).wanted(terms)
