"""Parameters as text between tags, in the way that the parser reads them back to values of their schema's types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ingot.errors import BadRequest, Unsupported
from ingot.text.formats.format import KeyClose, TextParameters
from ingot.text.grammar.members import Member, Scope, members
from ingot.text.grammar.rules import Rules, anywhere, exactly, one_of, optional, sequence
from ingot.text.parameters import TextValue
from ingot.text.schema_types import ANY, STRING, Kinds, parameter_kinds

_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"
_OF_STRINGS = frozenset({"type", "enum", "const", "minLength", "maxLength"})
_OF_TYPES = frozenset({"type", "nullable"})


class ParameterWriter:
    """Writes the rules of one tool's parameters."""

    def __init__(self, rules: Rules, part: TextParameters, scope: Scope) -> None:
        self._rules, self._part, self._scope = rules, part, scope

    def parameters(self) -> str:
        listed = members(self._scope.root, self._scope)
        if listed is None:
            anything = Member("", True, True)
            written = [f"({self._parameter(anything, self._rules.terminal(_KEY))})*"]
        else:
            each = [(self._parameter(one, self._key(one.name)), one.required) for one in listed]
            written = [expression if required else optional(expression) for expression, required in each]
        return sequence([*written, self._rules.literal(self._part.end)])

    def _key(self, name: str) -> str:
        ends = [close.text for close in self._part.key_closes]
        if not name.isprintable() or not name or any(end in name for end in ends):
            raise BadRequest(f"The parameter name {name!r} cannot be written in this model's tool format.")
        return self._rules.literal(name)

    def _parameter(self, member: Member, key: str) -> str:
        rules, part = self._rules, self._part
        kinds = parameter_kinds(self._scope.root, member.name) if member.name else ANY
        ways = []
        for close in part.key_closes:
            value = self._value(member, kinds, close)
            if value is not None:
                between = rules.literal(close.text + (f"\n{part.value_open}" if part.value_open else "") + part.frame)
                ways.append(sequence([rules.literal(part.key_open), key, between, value, rules.literal("\n")]))
        return rules.rule(one_of(ways))

    def _value(self, member: Member, kinds: Kinds, close: KeyClose) -> str | None:
        """The value and its closing tag; None where this kind of key cannot hold one."""
        if close.value == "text":
            return self._text(member, exact="string" in kinds and kinds != STRING) if "string" in kinds else None
        if close.value == "json":
            return self._json(member, kinds - STRING) if kinds - STRING else None
        if "string" not in kinds:
            return self._json(member, kinds)
        return self._text(member) if kinds == STRING else self._mixed(member, kinds)

    def _json(self, member: Member, kinds: Kinds) -> str:
        schema = self._scope.enclosed(member.schema)
        if kinds != ANY and not _states_type(schema, kinds):
            schema = self._scope.enclosed({"allOf": [member.schema, {"type": sorted(kinds)}]})
        return sequence([self._rules.json(schema, lenient=not self._scope.strict), self._closing()])

    def _text(self, member: Member, *, exact: bool = False) -> str:
        """A string, as it stands. `exact`: one of several types, which its schema must then not narrow further."""
        schema = self._scope.resolved(member.schema)
        schema = schema if isinstance(schema, Mapping) else {}
        if exact:
            self._scope.refuse(schema, _OF_TYPES)
            return self._until_closing([])
        self._scope.refuse(schema, _OF_STRINGS)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            return self._one_of_values([value for value in values if isinstance(value, str)], STRING)
        return self._until_closing(_length(schema))

    def _mixed(self, member: Member, kinds: Kinds) -> str:
        """A string or something else: text that looks like the other is read as that."""
        schema = self._scope.resolved(member.schema)
        schema = schema if isinstance(schema, Mapping) else {}
        if "enum" in schema:
            self._scope.refuse(schema, frozenset({"enum", "type"}))
            return self._one_of_values(schema["enum"], kinds)
        branches = schema.get("anyOf") or schema.get("oneOf") or []
        self._scope.refuse(schema, _OF_TYPES | {"anyOf", "oneOf"})
        for branch in map(self._scope.resolved, branches):
            self._scope.refuse(branch if isinstance(branch, Mapping) else {}, _OF_TYPES)
        return self._until_closing([])

    def _one_of_values(self, values: list[Any], kinds: Kinds) -> str:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        for value, text in zip(values, texts, strict=True):
            if self._part.value_close in text or _read(text, kinds, self._part.frame) != value:
                raise Unsupported(f"The value {text!r} of an enum cannot be written in this model's tool format.")
        return sequence([one_of([self._rules.literal(text) for text in texts]), self._closing()])

    def _until_closing(self, also: list[str]) -> str:
        """Any text up to the closing tag, which it cannot hold."""
        part = self._part
        return self._rules.text_until(part.frame + part.value_close, [anywhere(exactly(part.value_close))], also)

    def _closing(self) -> str:
        return self._rules.literal(self._part.frame + self._part.value_close)


def _length(schema: Mapping[str, Any]) -> list[str]:
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least is None and most is None:
        return []
    return [f"/(?s:.){{{least or 0},{'' if most is None else most}}}/"]


def _states_type(schema: Any, kinds: Kinds) -> bool:
    stated = schema.get("type") if isinstance(schema, Mapping) else None
    return frozenset({stated} if isinstance(stated, str) else stated or ()) == kinds


def _read(text: str, kinds: Kinds, frame: str) -> Any:
    """What the parser makes of a text."""
    written: list[str] = []
    value = TextValue(kinds, frame, written.append)
    value.write(frame + text + frame)
    value.close()
    return json.loads("".join(written))
