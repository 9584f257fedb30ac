"""Arguments in a notation that is not JSON's: Python's calls, and strings between markers with nothing escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ingot.errors import BadRequest, Unsupported
from ingot.text.formats.notation import Notation
from ingot.text.grammar.json_schema import KINDS, Alternative, Texts, alternatives
from ingot.text.grammar.lark import Rules, anywhere, exactly, one_of, sequence
from ingot.text.grammar.members import Members, Scope, join_members, members
from ingot.text.grammar.schema_rules import SchemaRules
from ingot.text.parser.values import bare_key


class NotatedWriter:
    """Writes the rules of one tool's arguments in `notation`."""

    def __init__(self, rules: Rules, notation: Notation, scope: Scope) -> None:
        self._rules, self._notation, self._scope = rules, notation, scope
        self._values = SchemaRules(rules)
        self._anything = ""

    def arguments(self, before: str) -> str:
        """The outermost object, and the text before it."""
        notation = self._notation
        inside = self._members(members(self._scope.root, self._scope), notation.assigns)
        return sequence([self._rules.literal(before + notation.opens), inside, self._rules.literal(notation.closes)])

    def _value(self, schema: Any) -> str:
        if self._notation.escapes != "none":
            # Python reads what JSON writes, but for escapes that the library does not use.
            return self._rules.rule(self._rules.json(self._scope.enclosed(schema), lenient=not self._scope.strict))
        if not isinstance(schema, Mapping):
            return self._any_value()
        return self._values.rule(schema, (), lambda: self._allowed(schema))

    def _allowed(self, schema: Mapping[str, Any]) -> str:
        allowed = alternatives(schema, self._scope)
        strings = [one for one in allowed if one.kind == "string"]
        written = [self._string(strings)] if strings else []
        written += [self._of_kind(one) for one in allowed if one.kind != "string"]
        return one_of(written)

    def _of_kind(self, one: Alternative) -> str:
        match one.kind:
            case "values":
                return one_of([self._rules.literal(self._written(value)) for value in one.values])
            case "string":
                return self._string([one])
            case "array":
                return self._array(one.says)
            case "object":
                inside = self._members(members(one.says, self._scope), ":")
                return sequence([self._rules.literal("{"), inside, self._rules.literal("}")])
        return self._rules.json({**one.says, "type": one.kind})

    def _string(self, strings: list[Alternative]) -> str:
        quote = self._notation.quotes[0]
        texts = Texts(self._rules, self._scope, [anywhere(exactly(quote))])
        return sequence([self._rules.literal(quote), texts.until(quote, strings)])

    def _array(self, says: Mapping[str, Any]) -> str:
        item = self._value(says.get("items", True))
        least, most = int(says.get("minItems") or 0), says.get("maxItems")
        if most == 0:
            return self._rules.literal("[]")
        bounds = f"{{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        items = f"{item} ({self._rules.literal(self._comma)} {item}){bounds}"
        return sequence(['"["', items if least else f"({items})?", '"]"'])

    def _members(self, found: Members, assigns: str) -> str:
        comma, assignment = self._rules.literal(self._comma), self._rules.literal(assigns)
        if found.others is not None:
            key = self._rules.terminal(r"/[A-Za-z_][A-Za-z0-9_]{0,63}/")
            one = self._rules.rule(sequence([key, assignment, self._value(found.others)]))
            return f"({one} ({comma} {one})*)?"
        written = []
        for member in found.listed:
            pieces = [self._key(member.name), assignment, self._value(member.schema)]
            written.append((sequence(pieces), member.required))
        return join_members(self._rules, written, comma)

    def _any_value(self) -> str:
        if not self._anything:
            self._anything = self._rules.reserve()
            written = [self._of_kind(Alternative(kind, {})) for kind in KINDS]
            self._rules.define(self._anything, one_of(written))
        return self._anything

    @property
    def _comma(self) -> str:
        return "," if self._notation.escapes == "none" else ", "

    def _key(self, name: str) -> str:
        if bare_key(name):
            return self._rules.literal(name)
        quote = self._notation.quotes[0]
        if self._notation.escapes != "none":
            return self._rules.literal(json.dumps(name, ensure_ascii=False))
        if quote in name:
            raise BadRequest(f"The parameter name {name!r} cannot be written in this model's tool format.")
        return self._rules.literal(f"{quote}{name}{quote}")

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
