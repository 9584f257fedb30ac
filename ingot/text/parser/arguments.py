"""Arguments of calls: as an object or as text, and which JSON types a tool's schema allows for them.

Arguments are not always the JSON object that they should be. A model may be cut off amid a call, or write one wrong,
and clients send back what they were sent: text that is no JSON, a list, nothing at all. No such call may end a
conversation. So arguments are text or an object, as whoever reads them likes, and whatever is no object is one that
holds the text: `{"_unparsed": "..."}`. No function takes an argument of that name, so nobody can run half a call by
mistake.

Of JSON Schema, `ValueSchema` knows the little that text needs to be typed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

UNPARSED_KEY: Final = "_unparsed"
DEEPEST_ARGUMENTS: Final = 64  # objects that nest deeper are left as text: templates and their filters follow them down


def arguments_as_object(arguments: Any) -> dict[str, Any]:
    """The arguments as an object. Nothing (null, or an empty text) is one without members."""
    parsed = _parse_arguments(arguments)
    if isinstance(parsed, str):
        return {UNPARSED_KEY: parsed}
    return parsed


def arguments_as_text(arguments: Any) -> str:
    """The arguments as text: what was written stays as it was written."""
    parsed = _parse_arguments(arguments)
    if isinstance(parsed, str):
        return parsed
    return arguments if parsed and isinstance(arguments, str) else dump_arguments(parsed)


def are_unparsed_arguments(arguments: Any) -> bool:
    """Whether the arguments are no object, so that only their text is meaningful."""
    return isinstance(_parse_arguments(arguments), str)


def answer_arguments(text: str, *, complete: bool) -> dict[str, Any]:
    """The arguments that a model wrote, for protocols that cannot send text. Nothing is made up to close them."""
    value: dict[str, Any] = json.loads(text or "{}") if complete else {UNPARSED_KEY: text}
    return value


def dump_arguments(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _parse_arguments(arguments: Any) -> dict[str, Any] | str:
    """The object that the arguments are; where they are none, their text."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return arguments
    if value is None:
        return {}
    if not isinstance(value, Mapping) or _nests_too_deep(value):
        return arguments if isinstance(arguments, str) else dump_arguments(arguments)
    text = value.get(UNPARSED_KEY)
    if len(value) == 1 and isinstance(text, str):
        return text if text.strip() else {}
    return dict(value)


def _nests_too_deep(value: Any, level: int = 1) -> bool:
    if level > DEEPEST_ARGUMENTS:
        return isinstance(value, Mapping | list)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(_nests_too_deep(each, level + 1) for each in inner)


JsonType = Literal["string", "integer", "number", "boolean", "null", "array", "object"]
JsonTypes = frozenset[JsonType]

ANY_TYPE: JsonTypes = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
STRING_TYPE: JsonTypes = frozenset({"string"})
CONTAINER_TYPES: JsonTypes = frozenset({"array", "object"})

_DEEPEST_SCHEMA = 16  # references may go in circles
_TYPE_BY_KEYWORD: tuple[tuple[str, JsonType], ...] = (
    ("properties", "object"),
    ("additionalProperties", "object"),
    ("items", "array"),
    ("prefixItems", "array"),
)


@dataclass(frozen=True, slots=True)
class ValueSchema:
    """What a tool's schema states about one value: any of `schemas` may apply to it; nothing without one."""

    root: Mapping[str, Any]  # the document that references point into
    schemas: tuple[Any, ...]

    @classmethod
    def arguments(cls, parameters: Mapping[str, Any]) -> ValueSchema:
        return cls(parameters, (parameters,))

    @property
    def kinds(self) -> JsonTypes:
        """The kinds that the value may have; all of them where the schema does not say."""
        found = [_schema_types(schema, self.root, 0) for schema in self.schemas]
        return frozenset[JsonType]().union(*found) if found else ANY_TYPE

    def member(self, name: str) -> ValueSchema:
        """Of the value under this name, where this is an object."""
        return self._within(lambda schema: _property_schemas(schema, name))

    def item(self, index: int) -> ValueSchema:
        """The schema of the item at this index, where this is an array."""
        return self._within(lambda schema: _item_schemas(schema, index))

    def _within(self, parts: Callable[[Mapping[str, Any]], Iterable[Any]]) -> ValueSchema:
        branches = [branch for schema in self.schemas for branch in _schema_branches(schema, self.root)]
        found = {id(part): part for branch in branches for part in parts(branch)}
        return ValueSchema(self.root, tuple(found.values()))


def parameter_types(parameters: Mapping[str, Any], name: str) -> JsonTypes:
    """The kinds that the parameter `name` may have."""
    return ValueSchema.arguments(parameters).member(name).kinds


def _property_schemas(schema: Mapping[str, Any], name: str) -> Iterable[Any]:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        yield properties[name]
    elif isinstance(schema.get("additionalProperties"), Mapping):
        yield schema["additionalProperties"]


def _item_schemas(schema: Mapping[str, Any], index: int) -> Iterable[Any]:
    first = _as_list(schema.get("prefixItems"))
    if index < len(first):
        yield first[index]
    elif isinstance(schema.get("items"), Mapping):
        yield schema["items"]


def _schema_branches(schema: Any, root: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
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
            waiting.append(resolve_reference(branch["$ref"], root))
        for keyword in ("allOf", "anyOf", "oneOf"):
            waiting += _as_list(branch.get(keyword))


def _schema_types(schema: Any, root: Mapping[str, Any], depth: int) -> JsonTypes:
    if not isinstance(schema, Mapping) or depth > _DEEPEST_SCHEMA:
        return ANY_TYPE
    allowed = ANY_TYPE
    for stated in _keyword_types(schema, root, depth):
        # Statements that leave nothing in common are a mistake of the schema's: the narrowest so far stands.
        allowed = allowed & stated or allowed
    return allowed | {"null"} if schema.get("nullable") is True else allowed


def _keyword_types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterable[JsonTypes]:
    """What each keyword allows; all of them hold together."""
    if "type" in schema:
        yield _stated_types(schema["type"])
    if "const" in schema:
        yield frozenset({json_type_of(schema["const"])})
    if values := _as_list(schema.get("enum")):
        yield frozenset(map(json_type_of, values))
    if "$ref" in schema:
        yield _schema_types(resolve_reference(schema["$ref"], root), root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if branches := _as_list(schema.get(keyword)):
            yield frozenset[JsonType]().union(*(_schema_types(branch, root, depth + 1) for branch in branches))
    for branch in _as_list(schema.get("allOf")):
        yield _schema_types(branch, root, depth + 1)
    for keyword, kind in _TYPE_BY_KEYWORD:
        if keyword in schema and "type" not in schema:
            yield frozenset({kind})


def _stated_types(types: Any) -> JsonTypes:
    names = [types] if isinstance(types, str) else _as_list(types)
    valid = frozenset(cast(JsonType, name) for name in names if isinstance(name, str) and name in ANY_TYPE)
    return valid or ANY_TYPE


def json_type_of(value: Any) -> JsonType:
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


def resolve_reference(reference: Any, root: Mapping[str, Any]) -> Any:
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


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
