"""Which JSON types a tool's schema allows for a parameter: the little of JSON Schema that text needs to be typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

JsonType = Literal["string", "integer", "number", "boolean", "null", "array", "object"]
JsonTypes = frozenset[JsonType]

ANY: JsonTypes = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
STRING: JsonTypes = frozenset({"string"})
CONTAINERS: JsonTypes = frozenset({"array", "object"})

_DEEPEST = 16  # references may go in circles
_TELLING: tuple[tuple[str, JsonType], ...] = (
    ("properties", "object"),
    ("additionalProperties", "object"),
    ("items", "array"),
    ("prefixItems", "array"),
)


@dataclass(frozen=True, slots=True)
class Described:
    """What a tool's schema says of one value: all of `schemas`, any of which may be about it; nothing without one."""

    root: Mapping[str, Any]  # the document that references point into
    schemas: tuple[Any, ...]

    @classmethod
    def arguments(cls, parameters: Mapping[str, Any]) -> Described:
        return cls(parameters, (parameters,))

    @property
    def kinds(self) -> JsonTypes:
        """The kinds that the value may have; all of them where the schema does not say."""
        found = [_kinds(schema, self.root, 0) for schema in self.schemas]
        return frozenset[JsonType]().union(*found) if found else ANY

    def member(self, name: str) -> Described:
        """Of the value under this name, where this is an object."""
        return self._within(lambda schema: _property(schema, name))

    def item(self, index: int) -> Described:
        """Of the value at this place, where this is an array."""
        return self._within(lambda schema: _item(schema, index))

    def _within(self, parts: Callable[[Mapping[str, Any]], Iterable[Any]]) -> Described:
        branches = [branch for schema in self.schemas for branch in _branches(schema, self.root)]
        found = {id(part): part for branch in branches for part in parts(branch)}
        return Described(self.root, tuple(found.values()))


def parameter_kinds(parameters: Mapping[str, Any], name: str) -> JsonTypes:
    """The kinds that the parameter `name` may have."""
    return Described.arguments(parameters).member(name).kinds


def _property(schema: Mapping[str, Any], name: str) -> Iterable[Any]:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        yield properties[name]
    elif isinstance(schema.get("additionalProperties"), Mapping):
        yield schema["additionalProperties"]


def _item(schema: Mapping[str, Any], index: int) -> Iterable[Any]:
    first = _list(schema.get("prefixItems"))
    if index < len(first):
        yield first[index]
    elif isinstance(schema.get("items"), Mapping):
        yield schema["items"]


def _branches(schema: Any, root: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The schema and those it is made of, references followed; each once, as references may go in circles."""
    waiting = [schema]
    seen: set[int] = set()
    while waiting:
        branch = waiting.pop(0)
        if not isinstance(branch, Mapping) or id(branch) in seen:
            continue
        seen.add(id(branch))
        yield branch
        if "$ref" in branch:
            waiting.append(_resolved(branch["$ref"], root))
        for keyword in ("allOf", "anyOf", "oneOf"):
            waiting += _list(branch.get(keyword))


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> JsonTypes:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return ANY
    allowed = ANY
    for stated in _statements(schema, root, depth):
        # Statements that leave nothing in common are a mistake of the schema's: the narrowest so far stands.
        allowed = allowed & stated or allowed
    return allowed | {"null"} if schema.get("nullable") is True else allowed


def _statements(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterable[JsonTypes]:
    """What each keyword allows; all of them hold together."""
    if "type" in schema:
        yield _named(schema["type"])
    if "const" in schema:
        yield frozenset({kind_of(schema["const"])})
    if values := _list(schema.get("enum")):
        yield frozenset(map(kind_of, values))
    if "$ref" in schema:
        yield _kinds(_resolved(schema["$ref"], root), root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if branches := _list(schema.get(keyword)):
            yield frozenset[JsonType]().union(*(_kinds(branch, root, depth + 1) for branch in branches))
    for branch in _list(schema.get("allOf")):
        yield _kinds(branch, root, depth + 1)
    for keyword, kind in _TELLING:
        if keyword in schema and "type" not in schema:
            yield frozenset({kind})


def _named(types: Any) -> JsonTypes:
    names = [types] if isinstance(types, str) else _list(types)
    known = frozenset(cast(JsonType, name) for name in names if isinstance(name, str) and name in ANY)
    return known or ANY


def kind_of(value: Any) -> JsonType:
    """Of a value as JSON has it."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _resolved(reference: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference within the same document points to; None, which allows all, if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
