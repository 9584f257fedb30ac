"""The field that names a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingot.errors import ModelNotFound
from ingot.protocol.model_names import is_name, names_schema, unknown_name
from ingot.protocol.schema.fields import BodyReading, Kind, Schema
from ingot.protocol.terms import Terms

BETWEEN: Final = ":"


@dataclass(frozen=True, slots=True)
class ModelName(Kind):
    """A name under which the model is served. Any other is a 404 that lists what is."""

    types, words = (str,), "the name of a model, as a string"

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str):
            raise self.refuse(value, path, reading)
        if not is_name(value, reading.terms.models) and adapter_in(value, reading.terms) is None:
            raise unknown_model(value, reading.terms)
        return value

    def schema(self, terms: Terms) -> Schema:
        return names_schema(names_in(terms))


def unknown_model(name: str, terms: Terms) -> ModelNotFound:
    return unknown_name(name, (*terms.models, *terms.loras))


def adapter_in(model: str, terms: Terms) -> str | None:
    """The adapter that a `model` names, if it does: alone, or behind a model's name."""
    if model in terms.loras:
        return model
    base, between, name = model.rpartition(BETWEEN)
    return name if between and name in terms.loras and is_name(base, terms.models) else None


def names_in(terms: Terms) -> tuple[str, ...]:
    """What `model` may be: models' names, adapters', and these behind those."""
    both = (f"{model}{BETWEEN}{lora}" for model in terms.models for lora in terms.loras)
    return (*terms.models, *terms.loras, *both)
