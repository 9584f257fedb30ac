"""Fields whose bounds a model that does not generate sets: its names; an encoder's token ids, dimensions, prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingot.protocol.schema.fields import BodyReading, DelegateKind, FieldKind, Int, OneOf, Schema
from ingot.protocol.schema.model_fields import ModelNameField, TokenIdsField
from ingot.protocol.terms import Terms, matches_model_name, model_names_schema, unknown_model_error

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class TaskModelField(FieldKind):
    """A name of the served model of a kind that does not generate. Any other is a 404 that lists what there is."""

    types, words = (str,), ModelNameField.words
    model_kind: str

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str):
            raise self.refuse(value, path, reading)
        names = reading.terms.task(self.model_kind).models
        if not matches_model_name(value, names):
            raise unknown_model_error(value, names)
        return value

    def schema(self, terms: Terms) -> Schema:
        names = terms.task(self.model_kind).models
        return model_names_schema(names) if names else {"type": "string"}


@dataclass(frozen=True, slots=True)
class EncoderTokenIdsField(DelegateKind):
    """A list of token ids of the embedding model."""

    most: int

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[int, ...]:
        return self.kind(reading.terms).parse(value, path, BodyReading(self._terms(reading.terms)))

    def schema(self, terms: Terms) -> Schema:
        return self.kind(terms).schema(self._terms(terms))

    def kind(self, terms: Terms) -> TokenIdsField:
        return TokenIdsField(self.most)

    def _terms(self, terms: Terms) -> Terms:
        known = terms.task("embedding")
        return Terms(known.models, known.vocab, terms.timeout_s, terms.strict)


@dataclass(frozen=True, slots=True)
class DimensionsField(DelegateKind):
    """How many numbers of each vector are wanted: at most as many as the model gives."""

    def kind(self, terms: Terms) -> Int:
        return Int((1, terms.task("embedding").dimension))


@dataclass(frozen=True, slots=True)
class PromptNameField(FieldKind):
    """One of the prompts that the embedding model's files name."""

    types = (str,)

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        names = self._names(reading.terms)
        if not names:
            raise self.refuse(value, path, reading)
        return OneOf(names).parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return OneOf(self._names(terms)).schema(terms) if self._names(terms) else {"enum": [None]}

    def wanted(self, terms: Terms) -> str:
        names = self._names(terms)
        return OneOf(names).wanted(terms) if names else "nothing, as the model's files name no prompts"

    def _names(self, terms: Terms) -> tuple[str, ...]:
        return terms.task("embedding").prompts
