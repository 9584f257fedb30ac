"""Which adapter a request goes through: its `model` may be an adapter's name, alone or behind a model's (`base:name`),
or its `adapter` is. Pure translation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ingot.engine.request import LoraRef
from ingot.errors import BadRequest, ModelNotFound
from ingot.protocol.schema.fields import BodyReading, Kind, Schema
from ingot.protocol.schema.model_name import adapter_in
from ingot.protocol.terms import Terms

WHICH_ADAPTER: Final = "The LoRA adapter to go through; `model` may name it, too."


@dataclass(frozen=True, slots=True)
class AdapterName(Kind):
    """An adapter's name. Any other is a 404 that lists them."""

    types, words = (str,), "the name of an adapter, as a string"

    def parse(self, value: object, path: str, reading: BodyReading) -> str:
        if not isinstance(value, str):
            raise self.refuse(value, path, reading)
        if value not in reading.terms.loras:
            raise unknown_adapter(value, reading.terms.loras, path)
        return value

    def schema(self, terms: Terms) -> Schema:
        return {"type": "string", "enum": list(terms.loras)} if terms.loras else {"type": "string"}


def lora_of(model: str, adapter: str | None, terms: Terms) -> LoraRef | None:
    """What a request with these goes through. Raises BadRequest where they name two."""
    named = adapter_in(model, terms)
    if named is not None and adapter is not None and named != adapter:
        raise BadRequest(f"model names the adapter {named!r}, and adapter another: choose one.", param="adapter")
    chosen = adapter or named or terms.default_lora
    return None if chosen is None else terms.loras.get(chosen)


def unknown_adapter(name: str, known: Iterable[str], param: str) -> ModelNotFound:
    listed = ", ".join(f"'{one}'" for one in known) or "none"
    return ModelNotFound(f"There is no adapter '{name[:200]}' here. Loaded: {listed}.", param=param)
