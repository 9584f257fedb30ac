"""Parameters as text between tags, in the way that the parser reads them back to values of their schema's types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import BadRequest
from ingot.text.grammar.lark import Rules, anywhere, exactly, one_of, optional, sequence
from ingot.text.grammar.members import Member, Scope, members
from ingot.text.grammar.text_values import TextValueWriter
from ingot.text.parser.arguments import ANY, STRING, JsonTypes, parameter_kinds
from ingot.text.tool_formats.format import KeyClose, Part, TextParameters

_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"


class ParameterWriter:
    """Writes the rules of one tool's parameters."""

    def __init__(self, rules: Rules, part: TextParameters, scope: Scope, closing: Sequence[Part] = ()) -> None:
        self._rules, self._part, self._scope = rules, part, scope
        without = [anywhere(exactly(part.value_close))]
        if part.close_optional:
            # What the parser takes for the end of a value whose closing tag was forgotten.
            behind = [exactly(literal) for literal in closing if isinstance(literal, str)]
            keys = [exactly(close.text) for close in part.key_closes]
            names = [exactly(one.name) for one in members(scope.root, scope).listed]
            without += [anywhere(f"{exactly(part.end)}[ \\t\\r\\n]*{literal}") for literal in behind]
            without += [anywhere(f"{exactly(part.key_open)}({'|'.join(names)}){key}") for key in keys if names]
        self._texts = TextValueWriter(rules, scope, without, part.frame)

    def parameters(self) -> str:
        found = members(self._scope.root, self._scope)
        if found.others is not None:
            other = Member("", found.others, True)
            written = [f"({self._parameter(other, self._rules.terminal(_KEY))})*"]
        else:
            each = [(self._parameter(one, self._key(one.name)), one.required) for one in found.listed]
            written = [expression if required else optional(expression) for expression, required in each]
        return sequence([*written, self._rules.literal(self._part.end)])

    def _key(self, name: str) -> str:
        ends = [close.text for close in self._part.key_closes]
        if not name.isprintable() or not name or any(end in name for end in ends):
            raise BadRequest(f"The parameter name {name!r} cannot be written in this model's tool format.")
        return self._rules.literal(name)

    def _parameter(self, member: Member, key: str) -> str:
        rules, part = self._rules, self._part
        kinds = parameter_kinds(self._scope.root, member.name)
        ways = []
        for close in part.key_closes:
            value = self._value(member, kinds, close) if close.written else None
            if value is not None:
                between = rules.literal(close.text + (f"\n{part.value_open}" if part.value_open else "") + part.frame)
                ways.append(sequence([rules.literal(part.key_open), key, between, value, rules.literal("\n")]))
        return rules.rule(one_of(ways))

    def _value(self, member: Member, kinds: JsonTypes, close: KeyClose) -> str | None:
        """The value and its closing tag; None where this kind of key cannot hold one."""
        if close.value == "text":
            return self._texts.value(member.schema, STRING, self._part.value_close) if "string" in kinds else None
        if close.value == "json":
            fit = kinds & close.kinds - STRING
            return self._json(member, fit) if fit else None
        if "string" not in kinds:
            return self._json(member, kinds)
        return self._texts.value(member.schema, kinds, self._part.value_close)

    def _json(self, member: Member, kinds: JsonTypes) -> str:
        schema = self._scope.enclosed(member.schema)
        if kinds != ANY and not _states_type(schema, kinds):
            schema = self._scope.enclosed({"allOf": [member.schema, {"type": sorted(kinds)}]})
        return sequence([self._rules.json(schema, lenient=not self._scope.strict), self._closing()])

    def _closing(self) -> str:
        return self._rules.literal(self._part.frame + self._part.value_close)


def _states_type(schema: Any, kinds: JsonTypes) -> bool:
    stated = schema.get("type") if isinstance(schema, Mapping) else None
    return frozenset({stated} if isinstance(stated, str) else stated or ()) == kinds
