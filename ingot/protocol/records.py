"""JSON objects with known fields, described by frozen dataclasses.

A record's field is declared with `requires`, `accepts` or `refuses`; its metadata holds the kind and the words for
the OpenAPI document. A field that may be left out may also be null, which means the same. A field that nobody
knows is noted as ignored; one that is nearly a known one, or any when reading strictly, is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ingot.errors import BadRequest, UnknownField, Unsupported, nearest
from ingot.protocol.bounds import FIELD_NAME_CHARS
from ingot.protocol.fields import Kind, OneOf, Reading, Refused, Schema, Terms
from ingot.protocol.rules import Never


def requires(kind: Kind, about: str) -> Any:
    return field(metadata={"kind": kind, "about": about})


def accepts(kind: Kind, about: str, default: Any = None) -> Any:
    return field(default=default, metadata={"kind": kind, "about": about})


def refuses(reason: str, *harmless: Any) -> Any:
    """A field that is known and cannot be honoured; `harmless` are the values that ask for nothing."""
    return field(default=None, metadata={"kind": Refused(reason, harmless), "about": f"Refused: {reason}"})


@dataclass(frozen=True, slots=True)
class Record(Kind):
    """An object that becomes an instance of the dataclass `cls`, unless a rule refuses what its fields say together."""

    cls: type
    rules: tuple[Never, ...] = ()

    def parse(self, value: object, path: str, reading: Reading) -> Any:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        known = specs_of(self.cls)
        for name in value:
            if name not in known:
                meet_unknown(name, known, path, reading)
        given = {}
        for name, spec in known.items():
            held = value.get(name)
            if held is not None or (name in value and is_required(spec)):
                given[name] = spec.metadata["kind"].parse(held, below(path, name), reading)
            elif is_required(spec):
                raise BadRequest(f"{below(path, name)} is required.", param=below(path, name))
        for rule in self.rules:
            rule.judge(value)
        return self.cls(**given)

    def schema(self, terms: Terms) -> Schema:
        specs = specs_of(self.cls).values()
        schema: Schema = {
            "type": "object",
            "properties": {spec.name: property_schema(spec, terms) for spec in specs},
            "additionalProperties": not terms.strict,
        }
        if required := [spec.name for spec in specs if is_required(spec)]:
            schema["required"] = required
        if self.rules:
            schema["allOf"] = [rule.schema() for rule in self.rules]
        return schema

    def admits(self, value: object) -> bool:
        return isinstance(value, dict)

    def wanted(self, terms: Terms) -> str:
        return "an object"


@dataclass(frozen=True, slots=True)
class Tagged(Kind):
    """An object whose field `tag` says which record it is. `refused` names known tags that cannot be honoured."""

    tag: str
    records: Mapping[str, Record]
    refused: Mapping[str, str] = field(default_factory=dict)

    def parse(self, value: object, path: str, reading: Reading) -> Any:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        where = below(path, self.tag)
        held = value.get(self.tag)
        if isinstance(held, str) and held in self.refused:
            raise Unsupported(f"{where}: '{held}' {self.refused[held]}", param=where)
        name = OneOf(tuple(self.records)).parse(held, where, reading)
        return self.records[name].parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        return {"anyOf": [record.schema(terms) for record in self.records.values()]}

    def admits(self, value: object) -> bool:
        return isinstance(value, dict)

    def wanted(self, terms: Terms) -> str:
        return f"an object with '{self.tag}'"


@cache
def specs_of(cls: type) -> Mapping[str, dataclasses.Field[Any]]:
    return {spec.name: spec for spec in dataclasses.fields(cls)}


def meet_unknown(name: str, known: Mapping[str, Any], path: str, reading: Reading) -> None:
    where = below(path, name[:FIELD_NAME_CHARS])
    if reading.knows_ignored(where):
        return
    meant = nearest(name, known) if len(name) <= FIELD_NAME_CHARS else None
    if meant is not None:
        raise UnknownField(f"Unknown field {where}: did you mean '{meant}'?", param=where)
    if reading.terms.strict:
        raise UnknownField(f"Unknown field {where}, and this server is strict.", param=where)
    reading.ignore(where)


def below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_required(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING


def property_schema(spec: dataclasses.Field[Any], terms: Terms) -> Schema:
    schema = spec.metadata["kind"].schema(terms)
    if not is_required(spec):
        schema = nullable(schema)
        if spec.default is not None:
            schema["default"] = list(spec.default) if isinstance(spec.default, tuple) else spec.default
    return schema | {"description": spec.metadata["about"]}


def nullable(schema: Schema) -> Schema:
    if not schema:  # anything at all
        return schema
    if "enum" in schema:
        schema = schema | {"enum": [*(v for v in schema["enum"] if v is not None), None]}
        schema.pop("type", None)
        return schema
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
