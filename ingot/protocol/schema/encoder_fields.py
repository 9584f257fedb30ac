"""Fields that depend on a model that does not generate: its names; an encoder's token ids, dimensions and prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ingot.protocol.schema.fields import BodyReading, DelegateKind, FieldKind, Int, OneOf, Schema
from ingot.protocol.schema.model_fields import ModelNameField
from ingot.protocol.terms import Terms, model_names_schema


@dataclass(frozen=True, slots=True)
class TaskModelField(ModelNameField):
    """A name of the served model of a kind that does not generate."""

    model_kind: str

    def schema(self, terms: Terms) -> Schema:
        names = self.names(terms)
        return model_names_schema(names) if names else {"type": "string"}

    def names(self, terms: Terms) -> tuple[str, ...]:
        return terms.task(self.model_kind).models

    listed = names


@dataclass(frozen=True, slots=True)
class EncoderField(DelegateKind):
    """A field whose bounds are those of the embedding model: a token id is one of its vocabulary."""

    own: FieldKind

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        return self.own.parse(value, path, replace(reading, terms=self._terms(reading.terms)))

    def schema(self, terms: Terms) -> Schema:
        return self.own.schema(self._terms(terms))

    def kind(self, terms: Terms) -> FieldKind:
        return self.own

    def _terms(self, terms: Terms) -> Terms:
        encoder = terms.task("embedding")
        return replace(terms, models=encoder.models, vocab=encoder.vocab)


@dataclass(frozen=True, slots=True)
class DimensionsField(DelegateKind):
    """The length of the embeddings, at most that of the model's."""

    def kind(self, terms: Terms) -> Int:
        return Int((1, terms.task("embedding").dimension))


@dataclass(frozen=True, slots=True)
class PromptNameField(FieldKind):
    """One of the prompts in the embedding model's files."""

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
        return OneOf(names).wanted(terms) if names else "nothing, as the model's files have no prompts"

    def _names(self, terms: Terms) -> tuple[str, ...]:
        return terms.task("embedding").prompts
