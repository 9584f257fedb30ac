"""JSON objects with known fields, described by frozen dataclasses.

A record's field is declared with `requires`, `accepts` or `refuses`; its metadata holds the kind and the description
for the OpenAPI document. A field that may be left out may also be null, which means the same. An unknown field is named
in the receipt; a misspelt one (one or two typing errors away from a known one), or any unknown one when reading
strictly, is refused. Rules state which values an object's fields must not have together; like a kind, a rule both
checks a value and gives its JSON Schema.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ingot.errors import BadRequest, UnknownField, Unsupported
from ingot.protocol.chat.media import MediaPartKind
from ingot.protocol.schema.bounds import FIELD_NAME_CHARS, PARTS
from ingot.protocol.schema.fields import (
    BodyReading,
    Either,
    FieldKind,
    HintField,
    ListOf,
    OneOf,
    Refused,
    Schema,
    Text,
)
from ingot.protocol.schema.foreign import Alias, ForeignFields
from ingot.protocol.terms import Terms


@dataclass(frozen=True, slots=True)
class Is:
    """The condition that a field holds `value`; without one, that it holds anything but null."""

    name: str
    value: bool | int | str | None = None
    negated: bool = False

    def holds(self, body: Mapping[str, Any]) -> bool:
        found = body.get(self.name)
        if self.value is None:
            return (found is not None) != self.negated
        is_same = isinstance(found, bool) == isinstance(self.value, bool) and found == self.value
        return is_same != self.negated

    def schema(self) -> Schema:
        value = {"not": {"type": "null"}} if self.value is None else {"const": self.value}
        schema = {"required": [self.name], "properties": {self.name: value}}
        return {"not": schema} if self.negated else schema


IsSet = Is


def Not(condition: Is) -> Is:
    return replace(condition, negated=True)


@dataclass(frozen=True, slots=True)
class Never:
    """The rule that not all `conditions` hold of one object; `message` is the error."""

    conditions: tuple[Is, ...]
    message: str
    param: str

    def check(self, body: Mapping[str, Any]) -> None:
        if all(condition.holds(body) for condition in self.conditions):
            raise BadRequest(self.message, param=self.param)

    def schema(self) -> Schema:
        return {"not": {"allOf": [condition.schema() for condition in self.conditions]}, "description": self.message}


def find_misspelt_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is most likely a misspelling of, or None."""
    near = []
    for each in known:
        length = min(len(name), len(each))
        edits = edit_distance(name, each, most=2 if length >= 8 else 1 if length >= 4 else 0)
        near += [] if edits is None else [(edits, each)]
    return min(near)[1] if near else None


def edit_distance(one: str, other: str, *, most: int) -> int | None:
    """The Damerau-Levenshtein distance of two texts; None where it is more than `most`."""
    if abs(len(one) - len(other)) > most:
        return None
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        above, before, row = before, row, [i]
        for j, against in enumerate(other, start=1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                edits = min(edits, above[j - 2] + 1)
            row.append(edits)
    return row[-1] if row[-1] <= most else None


def requires(kind: FieldKind, about: str) -> Any:
    return field(metadata={"kind": kind, "about": about})


def accepts(kind: FieldKind, about: str, default: Any = None) -> Any:
    return field(default=default, metadata={"kind": kind, "about": about})


def refuses(reason: str, *harmless: Any) -> Any:
    """A known field that is not supported; `harmless` are the values that change nothing."""
    return field(default=None, metadata={"kind": Refused(reason, harmless), "about": f"Refused: {reason}"})


@dataclass(frozen=True, slots=True)
class ObjectOf(FieldKind):
    """An object that becomes an instance of the dataclass `cls`. `foreign` are other servers' fields that are known."""

    types, words = (dict,), "an object"
    cls: type
    rules: tuple[Never, ...] = ()
    foreign: ForeignFields = field(default_factory=dict)

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        known = field_specs(self.cls)
        fields = self._parse_foreign(value, path, reading)
        for name in value:
            if name not in known and name not in self.foreign:
                note_unknown_field(name, value[name], known, path, reading)
        for name, spec in known.items():
            raw = value.get(name)
            if raw is not None or (name in value and is_required_field(spec)):
                fields[name] = spec.metadata["kind"].parse(raw, path_below(path, name), reading)
            elif is_required_field(spec) and name not in fields:
                raise BadRequest(f"{path_below(path, name)} is required.", param=path_below(path, name))
        for rule in self.rules:
            rule.check(value)
        return self.cls(**fields)

    def _parse_foreign(self, value: Mapping[str, Any], path: str, reading: BodyReading) -> dict[str, Any]:
        """The values of our fields that come under other servers' names."""
        fields: dict[str, Any] = {}
        for name, meaning in self.foreign.items():
            if (raw := value.get(name)) is None:
                continue
            parsed = self._kind(meaning).parse(raw, path_below(path, name), reading)
            if not isinstance(meaning, Alias):
                continue
            if value.get(meaning.field) is not None or meaning.field in fields:
                reading.ignore_hint(path_below(path, name))
            else:
                fields[meaning.field] = parsed
        return fields

    def _kind(self, meaning: Alias | FieldKind) -> FieldKind:
        kind: FieldKind = (
            meaning if not isinstance(meaning, Alias) else field_specs(self.cls)[meaning.field].metadata["kind"]
        )
        return kind

    def schema(self, terms: Terms) -> Schema:
        specs = field_specs(self.cls).values()
        # A field without effect is only an additional property, where those are allowed.
        foreign = {
            name: self._foreign_schema(meaning, terms)
            for name, meaning in self.foreign.items()
            if terms.strict or not isinstance(meaning, HintField)
        }
        schema: Schema = {
            "type": "object",
            "properties": foreign | {spec.name: property_schema(spec, terms) for spec in specs},
            "additionalProperties": not terms.strict,
        }
        if required := [spec.name for spec in specs if is_required_field(spec)]:
            schema["required"] = required
        if self.rules:
            schema["allOf"] = [rule.schema() for rule in self.rules]
        return schema

    def _foreign_schema(self, meaning: Alias | FieldKind, terms: Terms) -> Schema:
        about = "Has no effect."
        if isinstance(meaning, Alias):
            about = f"Another name of {meaning.field}."
        elif isinstance(meaning, Refused):
            about = f"Refused: {meaning.reason}"
        return nullable_schema(self._kind(meaning).schema(terms)) | {"description": about}


@dataclass(frozen=True, slots=True)
class Tagged(FieldKind):
    """An object whose field `tag` names its record. `refused` are known tags that are not supported; `media` are tags
    of images and the like, which depend on the served model."""

    types = (dict,)
    tag: str
    records: Mapping[str, ObjectOf]
    refused: Mapping[str, str] = field(default_factory=dict)
    media: Mapping[str, MediaPartKind] = field(default_factory=dict)

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        where = path_below(path, self.tag)
        name = value.get(self.tag)
        if isinstance(name, str) and name in self.media:
            return self.media[name].parse(value, self.tag, path, reading)
        if isinstance(name, str) and name in self.refused:
            raise Unsupported(f"{where}: '{name}' {self.refused[name]}", param=where)
        return self.records[OneOf(tuple(self.records)).parse(name, where, reading)].parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        media = [kind.schema(self.tag, name, terms) for name, kind in self.media.items()]
        return {"anyOf": [*(record.schema(terms) for record in self.records.values()), *media]}

    def wanted(self, terms: Terms) -> str:
        return f"an object with '{self.tag}'"


def tagged(
    tag: str,
    *classes: type,
    refused: Mapping[str, str] | None = None,
    media: Mapping[str, MediaPartKind] | None = None,
) -> Tagged:
    """Records distinguished by the values that the field `tag` of each may have."""
    records = {name: ObjectOf(cls) for cls in classes for name in field_specs(cls)[tag].metadata["kind"].values}
    return Tagged(tag, records, refused or {}, media or {})


def text_or(parts: Tagged, least: int = 0) -> Either:
    """A message's content: a text, or a list of parts."""
    return Either((Text(), ListOf(parts, PARTS, least)))


@cache
def field_specs(cls: type) -> Mapping[str, dataclasses.Field[Any]]:
    return {spec.name: spec for spec in dataclasses.fields(cls)}


def note_unknown_field(name: str, value: Any, known: Mapping[str, Any], path: str, reading: BodyReading) -> None:
    where = path_below(path, name[:FIELD_NAME_CHARS])
    if reading.is_ignored(where) or (value is None and not reading.terms.strict):
        return  # null means the same as no field, as it does for known ones
    near = find_misspelt_name(name, known) if len(name) <= FIELD_NAME_CHARS else None
    if near is not None:
        raise UnknownField(f"Unknown field {where}: did you mean '{near}'?", param=where)
    if reading.terms.strict:
        raise UnknownField(f"Unknown field {where}, and this server is strict.", param=where)
    reading.ignore(where)


def path_below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_required_field(spec: dataclasses.Field[Any]) -> bool:
    return spec.default is dataclasses.MISSING


def property_schema(spec: dataclasses.Field[Any], terms: Terms) -> Schema:
    schema = spec.metadata["kind"].schema(terms)
    if not is_required_field(spec):
        schema = nullable_schema(schema)
        if spec.default is not None:
            schema["default"] = list(spec.default) if isinstance(spec.default, tuple) else spec.default
    return schema | {"description": spec.metadata["about"]}


def nullable_schema(schema: Schema) -> Schema:
    if not schema:  # anything at all
        return schema
    if "enum" in schema:
        schema = schema | {"enum": [*(v for v in schema["enum"] if v is not None), None]}
        schema.pop("type", None)
        return schema
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
