"""Arguments in a notation that is not JSON's: Python's calls, and strings between markers with nothing escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ingot.errors import BadRequest, Unsupported
from ingot.text.formats.notation import Notation
from ingot.text.grammar.members import Member, Scope, joined, members
from ingot.text.grammar.rules import Rules, anywhere, exactly, one_of, sequence

_BARE_KEY = re.compile(r"[A-Za-z_][\w.\-]*", re.ASCII)
_OF_STRINGS = frozenset({"type", "minLength", "maxLength"})
_OF_ARRAYS = frozenset({"type", "items", "minItems", "maxItems"})
_OF_NUMBERS = frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


class NotatedWriter:
    """Writes the rules of one tool's arguments in `notation`."""

    def __init__(self, rules: Rules, notation: Notation, scope: Scope) -> None:
        self._rules, self._notation, self._scope = rules, notation, scope
        self._referred: dict[str, str] = {}  # rules of what references lead to, which may lead back
        self._anything = ""

    def arguments(self, before: str) -> str:
        """The outermost object, and the text before it."""
        notation = self._notation
        listed = members(self._scope.root, self._scope)
        inside = self._any_members(notation.assigns) if listed is None else self._members(listed, notation.assigns)
        return sequence([self._rules.literal(before + notation.opens), inside, self._rules.literal(notation.closes)])

    def _value(self, schema: Any) -> str:
        if self._notation.escapes != "none":
            # Python reads what JSON writes, but for escapes that the library does not use.
            return self._rules.rule(self._rules.json(self._scope.enclosed(schema), lenient=not self._scope.strict))
        if not isinstance(schema, Mapping):
            return self._any_value()
        if "$ref" in schema:
            return self._reference(schema)
        if "enum" in schema or "const" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            self._scope.refuse(schema, frozenset({"type", "enum", "const"}))
            return one_of([self._rules.literal(self._written(value)) for value in values])
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches:
            self._scope.refuse(schema, frozenset({"anyOf", "type"}))
            return self._rules.rule(one_of([self._value(branch) for branch in branches]))
        return self._typed(schema)

    def _reference(self, schema: Mapping[str, Any]) -> str:
        reference = str(schema["$ref"])
        if reference not in self._referred:
            name = self._referred[reference] = self._rules.reserve()
            self._rules.define(name, self._value(self._scope.resolved(schema)))
        return self._referred[reference]

    def _typed(self, schema: Mapping[str, Any]) -> str:
        stated = schema.get("type") or next((kind for key, kind in _TELLING.items() if key in schema), None)
        kinds = [stated] if isinstance(stated, str) else stated
        if not kinds:
            self._scope.refuse(schema, frozenset())
            return self._any_value()
        return self._rules.rule(one_of([self._of_type(kind, schema) for kind in kinds]))

    def _of_type(self, kind: Any, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                self._scope.refuse(schema, _OF_STRINGS)
                return self._string(schema)
            case "array":
                self._scope.refuse(schema, _OF_ARRAYS)
                return self._array(schema)
            case "object":
                listed = members(schema, self._scope)
                inside = self._any_members(":") if listed is None else self._members(listed, ":")
                return sequence([self._rules.literal("{"), inside, self._rules.literal("}")])
            case "number" | "integer":
                self._scope.refuse(schema, _OF_NUMBERS)
                return self._rules.json({**{key: schema[key] for key in _OF_NUMBERS & schema.keys()}, "type": kind})
            case "boolean" | "null":
                self._scope.refuse(schema, frozenset({"type"}))
                return self._rules.json({"type": kind})
        raise BadRequest(f"A tool's schema names a type {kind!r}, which JSON Schema does not have.")

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength"), schema.get("maxLength")
        stated = least is not None or most is not None
        extra = [f"/(?s:.){{{least or 0},{'' if most is None else most}}}/"] if stated else []
        quote = self._notation.quotes[0]
        inside = self._rules.text_until(quote, [anywhere(exactly(quote))], extra)
        return sequence([self._rules.literal(quote), inside])

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        least, most = int(schema.get("minItems") or 0), schema.get("maxItems")
        if most == 0:
            return self._rules.literal("[]")
        bounds = f"{{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        items = f"{item} ({self._rules.literal(self._comma)} {item}){bounds}"
        return sequence(['"["', items if least else f"({items})?", '"]"'])

    def _members(self, listed: list[Member], assigns: str) -> str:
        written = []
        for member in listed:
            pieces = [self._key(member.name), self._rules.literal(assigns), self._value(member.schema)]
            written.append((sequence(pieces), member.required))
        return joined(self._rules, written, self._rules.literal(self._comma))

    def _any_members(self, assigns: str) -> str:
        key = self._rules.terminal(r"/[A-Za-z_][A-Za-z0-9_]{0,63}/")
        one = self._rules.rule(f"{key} {self._rules.literal(assigns)} {self._value(True)}")
        return f"({one} ({self._rules.literal(self._comma)} {one})*)?"

    def _any_value(self) -> str:
        if not self._anything:
            self._anything = self._rules.reserve()
            kinds = [self._of_type(kind, {}) for kind in _TYPES if kind != "integer"]
            self._rules.define(self._anything, one_of(kinds))
        return self._anything

    @property
    def _comma(self) -> str:
        return "," if self._notation.escapes == "none" else ", "

    def _key(self, name: str) -> str:
        if not _BARE_KEY.fullmatch(name):
            raise BadRequest(f"The parameter name {name!r} cannot be written in this model's tool format.")
        return self._rules.literal(name)

    def _written(self, value: Any) -> str:
        """A value of an enum."""
        match value:
            case str():
                quote = self._notation.quotes[0]
                if quote in value:
                    raise Unsupported(f"The value {value!r} of an enum cannot be written in this model's tool format.")
                return f"{quote}{value}{quote}"
            case Mapping() | list():
                raise Unsupported("An enum of objects or arrays cannot be written in this model's tool format.")
        return json.dumps(value)


_TELLING = {"properties": "object", "items": "array", "minLength": "string", "maxLength": "string", "minimum": "number"}
