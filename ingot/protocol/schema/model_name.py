"""The field that names a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ingot.errors import ModelNotFound
from ingot.protocol.model_names import is_name, names_schema
from ingot.protocol.schema.fields import BodyReading, Kind, Schema
from ingot.protocol.schema.terms import Terms


@dataclass(frozen=True, slots=True)
class ModelName(Kind):
    """A name under which the model is served. Any other is a 404 that lists what is."""

    types, words = (str,), "the name of a model, as a string"

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str):
            raise self.refuse(value, path, reading)
        if not is_name(value, reading.terms.models):
            raise unknown_model(value, reading.terms)
        return value

    def schema(self, terms: Terms) -> Schema:
        return names_schema(terms.models)


def unknown_model(name: str, terms: Terms) -> ModelNotFound:
    return unknown_name(name, terms.models)


def unknown_name(name: str, known: Iterable[str]) -> ModelNotFound:
    served = ", ".join(f"'{one}'" for one in known)
    return ModelNotFound(f"There is no model '{name[:200]}' here. Served: {served}.", param="model")
