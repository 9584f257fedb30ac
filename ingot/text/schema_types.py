"""Which JSON types a tool's schema allows for a parameter: the little of JSON Schema that text needs to be typed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

Kind = Literal["string", "integer", "number", "boolean", "null", "array", "object"]
Kinds = frozenset[Kind]

ANY: Kinds = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
STRING: Kinds = frozenset({"string"})

_DEEPEST = 16  # references may go in circles
_TELLING: tuple[tuple[str, Kind], ...] = (
    ("properties", "object"),
    ("additionalProperties", "object"),
    ("items", "array"),
    ("prefixItems", "array"),
)


def parameter_kinds(parameters: Mapping[str, Any], name: str) -> Kinds:
    """The kinds that the parameter `name` may have; all of them where the schema does not say."""
    found = [kinds for schema in _branches(parameters, parameters, 0) for kinds in _property(schema, name, parameters)]
    return frozenset[Kind]().union(*found) if found else ANY


def _property(schema: Mapping[str, Any], name: str, root: Mapping[str, Any]) -> Iterable[Kinds]:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        yield _kinds(properties[name], root, 0)
    elif isinstance(schema.get("additionalProperties"), Mapping):
        yield _kinds(schema["additionalProperties"], root, 0)


def _branches(schema: Any, root: Mapping[str, Any], depth: int) -> Iterable[Mapping[str, Any]]:
    """The schema and those it is made of, references followed."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    yield schema
    if "$ref" in schema:
        yield from _branches(_resolved(schema["$ref"], root), root, depth + 1)
    for keyword in ("allOf", "anyOf", "oneOf"):
        for branch in _list(schema.get(keyword)):
            yield from _branches(branch, root, depth + 1)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> Kinds:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return ANY
    allowed = ANY
    for stated in _statements(schema, root, depth):
        # Statements that leave nothing in common are a mistake of the schema's: the narrowest so far stands.
        allowed = allowed & stated or allowed
    return allowed | {"null"} if schema.get("nullable") is True else allowed


def _statements(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterable[Kinds]:
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
            yield frozenset[Kind]().union(*(_kinds(branch, root, depth + 1) for branch in branches))
    for branch in _list(schema.get("allOf")):
        yield _kinds(branch, root, depth + 1)
    for keyword, kind in _TELLING:
        if keyword in schema and "type" not in schema:
            yield frozenset({kind})


def _named(types: Any) -> Kinds:
    names = [types] if isinstance(types, str) else _list(types)
    known = frozenset(cast(Kind, name) for name in names if isinstance(name, str) and name in ANY)
    return known or ANY


def kind_of(value: Any) -> Kind:
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
