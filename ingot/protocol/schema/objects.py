"""JSON objects with known fields, described by frozen dataclasses.

A record's field is declared with `requires`, `accepts` or `refuses`; its metadata holds the kind and the words for the
OpenAPI document. A field that may be left out may also be null, which means the same. An unknown field is noted as
ignored; a known one misspelt, or any unknown one when reading strictly, is refused. Misspelt means one or two slips
away: a letter left out, put in, replaced, or swapped with its neighbour. Rules say what the fields of one object must
not say together; like a kind, a rule both judges and gives its JSON Schema.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ingot.errors import BadRequest, UnknownField, Unsupported
from ingot.protocol.chat.media import MediaPartKind, OmittedMedia, omitted_media_schema
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
    note_ignored,
)
from ingot.protocol.schema.foreign import Alias, ForeignFields
from ingot.protocol.terms import Terms


class FieldCondition(ABC):
    """Something that may be true of an object as it was sent."""

    @abstractmethod
    def holds(self, value: Mapping[str, Any]) -> bool: ...

    @abstractmethod
    def schema(self) -> Schema: ...


@dataclass(frozen=True, slots=True)
class IsGiven(FieldCondition):
    name: str

    def holds(self, value: Mapping[str, Any]) -> bool:
        return value.get(self.name) is not None

    def schema(self) -> Schema:
        return {"required": [self.name], "properties": {self.name: {"not": {"type": "null"}}}}


@dataclass(frozen=True, slots=True)
class Is(FieldCondition):
    name: str
    value: bool | int | str

    def holds(self, value: Mapping[str, Any]) -> bool:
        held = value.get(self.name)
        return isinstance(held, bool) == isinstance(self.value, bool) and held == self.value

    def schema(self) -> Schema:
        return {"required": [self.name], "properties": {self.name: {"const": self.value}}}


@dataclass(frozen=True, slots=True)
class Not(FieldCondition):
    condition: FieldCondition

    def holds(self, value: Mapping[str, Any]) -> bool:
        return not self.condition.holds(value)

    def schema(self) -> Schema:
        return {"not": self.condition.schema()}


@dataclass(frozen=True, slots=True)
class Never:
    """Refuses an object of which all `conditions` hold, with the words `says`."""

    conditions: tuple[FieldCondition, ...]
    says: str
    param: str

    def judge(self, value: Mapping[str, Any]) -> None:
        if all(condition.holds(value) for condition in self.conditions):
            raise BadRequest(self.says, param=self.param)

    def schema(self) -> Schema:
        return {"not": {"allOf": [condition.schema() for condition in self.conditions]}, "description": self.says}


def find_misspelt_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a slip of, or None."""
    near = [
        (slips, each)
        for each in known
        if (slips := edit_distance(name, each, most=_allowed_slips(name, each))) is not None
    ]
    return min(near)[1] if near else None


def _allowed_slips(name: str, known: str) -> int:
    """Slips that leave names of this length recognisable."""
    length = min(len(name), len(known))
    return 2 if length >= 8 else 1 if length >= 4 else 0


def edit_distance(one: str, other: str, *, most: int) -> int | None:
    """Slips between two texts, after Damerau and Levenshtein; None where there are more than `most`."""
    if abs(len(one) - len(other)) > most:
        return None
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        above, before, row = before, row, [i]
        for j, against in enumerate(other, start=1):
            slips = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                slips = min(slips, above[j - 2] + 1)
            row.append(slips)
    return row[-1] if row[-1] <= most else None


def requires(kind: FieldKind, about: str) -> Any:
    return field(metadata={"kind": kind, "about": about})


def accepts(kind: FieldKind, about: str, default: Any = None) -> Any:
    return field(default=default, metadata={"kind": kind, "about": about})


def refuses(reason: str, *harmless: Any) -> Any:
    """A field that is known and cannot be honoured; `harmless` are the values that ask for nothing."""
    return field(default=None, metadata={"kind": Refused(reason, harmless), "about": f"Refused: {reason}"})


@dataclass(frozen=True, slots=True)
class ObjectOf(FieldKind):
    """An object that becomes an instance of the dataclass `cls`, unless a rule refuses what its fields say together.

    `foreign` are other servers' fields that are known too."""

    types, words = (dict,), "an object"
    cls: type
    rules: tuple[Never, ...] = ()
    foreign: ForeignFields = field(default_factory=dict)

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        known = field_specs(self.cls)
        given = self._foreign(value, path, reading)
        for name in value:
            if name not in known and name not in self.foreign:
                note_unknown_field(name, value[name], known, path, reading)
        for name, spec in known.items():
            held = value.get(name)
            if held is not None or (name in value and is_required_field(spec)):
                given[name] = spec.metadata["kind"].parse(held, path_below(path, name), reading)
            elif is_required_field(spec) and name not in given:
                raise BadRequest(f"{path_below(path, name)} is required.", param=path_below(path, name))
        for rule in self.rules:
            rule.judge(value)
        return self.cls(**given)

    def _foreign(self, value: Mapping[str, Any], path: str, reading: BodyReading) -> dict[str, Any]:
        """What other servers' fields say in place of ours."""
        given: dict[str, Any] = {}
        for name, meant in self.foreign.items():
            held = value.get(name)
            if held is None:
                continue
            read = self._kind(meant).parse(held, path_below(path, name), reading)
            if not isinstance(meant, Alias):
                continue
            if value.get(meant.field) is not None or meant.field in given:
                note_ignored(path_below(path, name), reading)
            else:
                given[meant.field] = read
        return given

    def _kind(self, meant: Alias | FieldKind) -> FieldKind:
        kind: FieldKind = field_specs(self.cls)[meant.field].metadata["kind"] if isinstance(meant, Alias) else meant
        return kind

    def schema(self, terms: Terms) -> Schema:
        specs = field_specs(self.cls).values()
        # What has no effect is no more than an additional property, where those are allowed.
        shown = {
            name: meant for name, meant in self.foreign.items() if terms.strict or not isinstance(meant, HintField)
        }
        foreign = {name: self._foreign_schema(meant, terms) for name, meant in shown.items()}
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

    def _foreign_schema(self, meant: Alias | FieldKind, terms: Terms) -> Schema:
        about = "Has no effect."
        if isinstance(meant, Alias):
            about = f"Another name of {meant.field}."
        elif isinstance(meant, Refused):
            about = f"Refused: {meant.reason}"
        return nullable_schema(self._kind(meant).schema(terms)) | {"description": about}


@dataclass(frozen=True, slots=True)
class Tagged(FieldKind):
    """An object whose field `tag` says which record it is. `refused` names known tags that cannot be honoured.

    Of those, `unseen` are told to the model in a few words where they are past; it says what they are. `media` are
    tags of pictures and the like, which depend on what the served model is shown."""

    types = (dict,)
    tag: str
    records: Mapping[str, ObjectOf]
    refused: Mapping[str, str] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)
    media: Mapping[str, MediaPartKind] = field(default_factory=dict)

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        if not isinstance(value, dict):
            raise self.refuse(value, path, reading)
        where = path_below(path, self.tag)
        held = value.get(self.tag)
        if isinstance(held, str) and held in self.media:
            return self.media[held].parse(value, self.tag, path, reading)
        if isinstance(held, str) and held in self.unseen and reading.past:
            note_ignored(path_below(path, held), reading)
            return OmittedMedia(self.unseen[held])
        if isinstance(held, str) and held in self.refused:
            raise Unsupported(f"{where}: '{held}' {self.refused[held]}", param=where)
        name = OneOf(tuple(self.records)).parse(held, where, reading)
        return self.records[name].parse(value, path, reading)

    def schema(self, terms: Terms) -> Schema:
        unseen = [omitted_media_schema(self.tag, name) for name in self.unseen]
        media = [each.schema(self.tag, name, terms) for name, each in self.media.items()]
        return {"anyOf": [*(record.schema(terms) for record in self.records.values()), *unseen, *media]}

    def wanted(self, terms: Terms) -> str:
        return f"an object with '{self.tag}'"


def tagged(
    tag: str,
    *classes: type,
    refused: Mapping[str, str] | None = None,
    unseen: Mapping[str, str] | None = None,
    media: Mapping[str, MediaPartKind] | None = None,
) -> Tagged:
    """Records told apart by what the field `tag` of each may hold."""
    records = {name: ObjectOf(cls) for cls in classes for name in field_specs(cls)[tag].metadata["kind"].values}
    return Tagged(tag, records, refused or {}, unseen or {}, media or {})


def text_or(parts: Tagged, least: int = 0) -> Either:
    """What is said: a text, or a list of parts."""
    return Either((Text(), ListOf(parts, PARTS, least)))


@cache
def field_specs(cls: type) -> Mapping[str, dataclasses.Field[Any]]:
    return {spec.name: spec for spec in dataclasses.fields(cls)}


def note_unknown_field(name: str, held: Any, known: Mapping[str, Any], path: str, reading: BodyReading) -> None:
    where = path_below(path, name[:FIELD_NAME_CHARS])
    if reading.knows_ignored(where) or (held is None and not reading.terms.strict):
        return  # null asks for nothing, as it does where the field is known
    meant = find_misspelt_name(name, known) if len(name) <= FIELD_NAME_CHARS else None
    if meant is not None:
        raise UnknownField(f"Unknown field {where}: did you mean '{meant}'?", param=where)
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
