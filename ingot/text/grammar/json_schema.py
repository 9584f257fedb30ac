"""What a value may be: one kind after another, each with what its schema says of that kind alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ingot.errors import BadRequest
from ingot.text.grammar.lark import Rules, quoted, slashed
from ingot.text.grammar.members import Scope
from ingot.text.grammar.patterns import matches_nothing, whole

ValueKind = Literal["values", "string", "number", "integer", "boolean", "null", "array", "object"]

_KEYWORDS: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_KEYWORDS["integer"] = _KEYWORDS["number"]
_TELLING = {"properties": "object", "items": "array", "minLength": "string", "maxLength": "string", "minimum": "number"}
_TELLING |= {"additionalProperties": "object", "pattern": "string", "maximum": "number"}
KINDS: tuple[ValueKind, ...] = ("string", "number", "boolean", "null", "array", "object")


@dataclass(frozen=True, slots=True)
class Alternative:
    """`values`: one of those of an enum. Else a value of this kind, with the keywords that are about the kind."""

    kind: ValueKind
    says: Mapping[str, Any]
    values: tuple[Any, ...] = ()

    @property
    def narrowed(self) -> bool:
        """Whether not every value of the kind will do."""
        return bool(self.says) or self.kind == "values"


def alternatives(schema: Any, scope: Scope) -> list[Alternative]:
    """All that `schema` allows, as far as it can be held to; in a strict scope, Unsupported names what cannot."""
    schema = scope.flat(schema)
    if not isinstance(schema, Mapping):
        return [Alternative(kind, {}) for kind in KINDS]
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches and isinstance(branches, list):
        return _branching(schema, branches, scope)
    kinds = _kinds(schema)
    if "enum" in schema or "const" in schema:
        return [_enumerated(schema, kinds, scope)]
    scope.refuse(schema, frozenset({"type", "nullable"}).union(*(_KEYWORDS[kind] for kind in kinds)))
    return [
        Alternative(kind, {key: schema[key] for key in sorted(_KEYWORDS[kind] & schema.keys())})
        for kind in (kinds or KINDS)
    ]


def _branching(schema: Mapping[str, Any], branches: Sequence[Any], scope: Scope) -> list[Alternative]:
    beside = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
    found = [alternatives(scope.both(branch, beside), scope) for branch in branches]
    if "anyOf" not in schema:
        kinds = [kind for each in found for kind in {"number" if one.kind == "integer" else one.kind for one in each}]
        if len(set(kinds)) < len(kinds):
            scope.refuse({"oneOf": branches}, frozenset())
    return [one for each in found for one in each]


def _enumerated(schema: Mapping[str, Any], kinds: Sequence[ValueKind], scope: Scope) -> Alternative:
    scope.refuse(schema, frozenset({"type", "enum", "const", "nullable"}))
    stated = [schema["const"]] if "const" in schema else schema["enum"]
    values = [value for value in stated if not kinds or _is_of(value, kinds)] if isinstance(stated, list) else []
    if not values:
        raise BadRequest("An enum of a tool's schema has no value, or none of its type.")
    return Alternative("values", {}, tuple(values))


def _kinds(schema: Mapping[str, Any]) -> list[ValueKind]:
    stated = schema.get("type") or next((kind for key, kind in _TELLING.items() if key in schema), None)
    kinds: list[Any] = list(stated) if isinstance(stated, list) else [stated] if stated else []
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _KEYWORDS:
            raise BadRequest(f"A tool's schema names a type {kind!r}, which JSON Schema does not have.")
    if kinds and schema.get("nullable") is True and "null" not in kinds:
        kinds.append("null")
    return kinds


def _is_of(value: Any, kinds: Sequence[str]) -> bool:
    match value:
        case None:
            return "null" in kinds
        case bool():
            return "boolean" in kinds
        case int():
            return "integer" in kinds or "number" in kinds
        case float():
            return "number" in kinds
        case str():
            return "string" in kinds
    return ("array" if isinstance(value, list) else "object") in kinds


class Texts:
    """Strings as they stand, none of which holds what would end it (`without`, patterns)."""

    def __init__(self, rules: Rules, scope: Scope, without: Sequence[str]) -> None:
        self._rules, self._scope, self._without = rules, scope, without

    def until(self, closing: str, strings: Sequence[Alternative]) -> str:
        """One of the strings, and `closing` behind it."""
        bodies = [body for one in strings for body in self._bodies(one)]
        body = bodies[0] if len(bodies) == 1 else self._rules.terminal(" | ".join(bodies))
        return self._rules.until(closing, body, empty=any(map(self._may_be_empty, strings)))

    def _bodies(self, one: Alternative) -> Iterator[str]:
        if one.kind == "values":
            yield from (quoted(value) for value in one.values if isinstance(value, str) and value)
        else:
            yield self._rules.text(self._without, [*_length(one.says), *self._patterns(one.says)])

    def _patterns(self, says: Mapping[str, Any]) -> Iterator[str]:
        for pattern in _listed(says.get("pattern")):
            if (expression := whole(str(pattern))) is not None:
                yield f"/{slashed(expression)}/"
            else:
                self._scope.refuse({"pattern": pattern}, frozenset())

    def _may_be_empty(self, one: Alternative) -> bool:
        if one.kind == "values":
            return "" in one.values
        held = [str(pattern) for pattern in _listed(one.says.get("pattern")) if whole(str(pattern)) is not None]
        return not one.says.get("minLength") and all(map(matches_nothing, held))


def _length(says: Mapping[str, Any]) -> list[str]:
    least, most = says.get("minLength"), says.get("maxLength")
    if least is None and most is None:
        return []
    return [f"/(?s:.){{{least or 0},{'' if most is None else most}}}/"]


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)
