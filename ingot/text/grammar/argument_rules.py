"""Rules for arguments that are not written as JSON, so that the parser reads them back to their schemas' types.

- `NotationRules`: Python's calls, and strings between markers with nothing escaped.
- `TextParameterRules`: parameters as text between tags.
- `ElementRules`: elements within elements. The closing tag repeats the opening one's name, so a grammar can only have
  names that the schema lists. An object of any others is written as JSON, which the parser reads as well; so is what
  could be an array or an object, as without items or members the two are the same.
- `TextValueRules`: text up to a closing tag, which may be a string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ingot.errors import BadRequest, Unsupported
from ingot.text.grammar.json_schema import (
    VALUE_KINDS,
    ObjectMembers,
    SchemaAlternative,
    SchemaMember,
    SchemaScope,
    StringRules,
    join_member_rules,
    object_members,
    schema_alternatives,
)
from ingot.text.grammar.lark import (
    LarkRules,
    SchemaRules,
    exact_pattern,
    lark_choice,
    lark_optional,
    lark_sequence,
    pattern_anywhere,
)
from ingot.text.parser.arguments import ANY_TYPE, CONTAINER_TYPES, STRING_TYPE, JsonTypes, ValueSchema, parameter_types
from ingot.text.parser.values import TextValue, is_bare_key
from ingot.text.tool_formats.format import Elements, KeyClose, Notation, Part, TextParameters


class NotationRules:
    """Writes the rules of one tool's arguments in `notation`."""

    def __init__(self, rules: LarkRules, notation: Notation, scope: SchemaScope) -> None:
        self._rules, self._notation, self._scope = rules, notation, scope
        self._values = SchemaRules(rules)
        self._anything = ""

    def arguments(self, before: str) -> str:
        """The outermost object, and the text before it."""
        notation = self._notation
        inside = self._members(object_members(self._scope.root, self._scope), notation.assigns)
        return lark_sequence(
            [self._rules.literal(before + notation.opens), inside, self._rules.literal(notation.closes)]
        )

    def _value(self, schema: Any) -> str:
        if self._notation.escapes != "none":
            # Python reads what JSON writes, but for escapes that the library does not use.
            return self._rules.rule(self._rules.json(self._scope.enclosed(schema), lenient=not self._scope.strict))
        if not isinstance(schema, Mapping):
            return self._any_value()
        return self._values.rule(schema, (), lambda: self._allowed(schema))

    def _allowed(self, schema: Mapping[str, Any]) -> str:
        allowed = schema_alternatives(schema, self._scope)
        strings = [one for one in allowed if one.kind == "string"]
        written = [self._string(strings)] if strings else []
        written += [self._of_kind(one) for one in allowed if one.kind != "string"]
        return lark_choice(written)

    def _of_kind(self, one: SchemaAlternative) -> str:
        match one.kind:
            case "values":
                return lark_choice([self._rules.literal(self._enum_text(value)) for value in one.values])
            case "string":
                return self._string([one])
            case "array":
                return self._array(one.keywords)
            case "object":
                inside = self._members(object_members(one.keywords, self._scope), ":")
                return lark_sequence([self._rules.literal("{"), inside, self._rules.literal("}")])
        return self._rules.json({**one.keywords, "type": one.kind})

    def _string(self, strings: list[SchemaAlternative]) -> str:
        quote = self._notation.quotes[0]
        texts = StringRules(self._rules, self._scope, [pattern_anywhere(exact_pattern(quote))])
        return lark_sequence([self._rules.literal(quote), texts.until(quote, strings)])

    def _array(self, keywords: Mapping[str, Any]) -> str:
        item = self._value(keywords.get("items", True))
        least, most = int(keywords.get("minItems") or 0), keywords.get("maxItems")
        if most == 0:
            return self._rules.literal("[]")
        bounds = f"{{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        items = f"{item} ({self._rules.literal(self._comma)} {item}){bounds}"
        return lark_sequence(['"["', items if least else f"({items})?", '"]"'])

    def _members(self, found: ObjectMembers, assigns: str) -> str:
        comma, assignment = self._rules.literal(self._comma), self._rules.literal(assigns)
        if found.others is not None:
            key = self._rules.terminal(r"/[A-Za-z_][A-Za-z0-9_]{0,63}/")
            one = self._rules.rule(lark_sequence([key, assignment, self._value(found.others)]))
            return f"({one} ({comma} {one})*)?"
        written = []
        for member in found.listed:
            pieces = [self._key(member.name), assignment, self._value(member.schema)]
            written.append((lark_sequence(pieces), member.required))
        return join_member_rules(self._rules, written, comma)

    def _any_value(self) -> str:
        if not self._anything:
            self._anything = self._rules.reserve()
            written = [self._of_kind(SchemaAlternative(kind, {})) for kind in VALUE_KINDS]
            self._rules.define(self._anything, lark_choice(written))
        return self._anything

    @property
    def _comma(self) -> str:
        return "," if self._notation.escapes == "none" else ", "

    def _key(self, name: str) -> str:
        if is_bare_key(name):
            return self._rules.literal(name)
        quote = self._notation.quotes[0]
        if self._notation.escapes != "none":
            return self._rules.literal(json.dumps(name, ensure_ascii=False))
        if quote in name:
            raise BadRequest(f"The parameter name {name!r} cannot be written in this model's tool format.")
        return self._rules.literal(f"{quote}{name}{quote}")

    def _enum_text(self, value: Any) -> str:
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


_FREE_KEY = r"/[A-Za-z_][A-Za-z0-9_.\-]{0,63}/"


class TextParameterRules:
    """Writes the rules of one tool's parameters."""

    def __init__(
        self, rules: LarkRules, part: TextParameters, scope: SchemaScope, closing: Sequence[Part] = ()
    ) -> None:
        self._rules, self._part, self._scope = rules, part, scope
        without = [pattern_anywhere(exact_pattern(part.value_close))]
        if part.close_optional:
            # What the parser takes for the end of a value whose closing tag was forgotten.
            behind = [exact_pattern(literal) for literal in closing if isinstance(literal, str)]
            keys = [exact_pattern(close.text) for close in part.key_closes]
            names = [exact_pattern(one.name) for one in object_members(scope.root, scope).listed]
            without += [pattern_anywhere(f"{exact_pattern(part.end)}[ \\t\\r\\n]*{literal}") for literal in behind]
            without += [
                pattern_anywhere(f"{exact_pattern(part.key_open)}({'|'.join(names)}){key}") for key in keys if names
            ]
        self._texts = TextValueRules(rules, scope, without, part.frame)

    def parameters(self) -> str:
        found = object_members(self._scope.root, self._scope)
        if found.others is not None:
            other = SchemaMember("", found.others, True)
            written = [f"({self._parameter(other, self._rules.terminal(_FREE_KEY))})*"]
        else:
            each = [(self._parameter(one, self._key(one.name)), one.required) for one in found.listed]
            written = [expression if required else lark_optional(expression) for expression, required in each]
        return lark_sequence([*written, self._rules.literal(self._part.end)])

    def _key(self, name: str) -> str:
        ends, written = [close.text for close in self._part.key_closes], self._part.write_key(name)
        if not name.isprintable() or not name or any(end in written for end in ends):
            raise BadRequest(f"The parameter name {name!r} cannot be written in this model's tool format.")
        return self._rules.literal(written)

    def _parameter(self, member: SchemaMember, key: str) -> str:
        rules, part = self._rules, self._part
        kinds = parameter_types(self._scope.root, member.name)
        alternatives = []
        for close in part.key_closes:
            value = self._value(member, kinds, close) if close.written else None
            if value is not None:
                between = rules.literal(close.text + (f"\n{part.value_open}" if part.value_open else "") + part.frame)
                alternatives.append(
                    lark_sequence([rules.literal(part.key_open), key, between, value, rules.literal("\n")])
                )
        return rules.rule(lark_choice(alternatives))

    def _value(self, member: SchemaMember, kinds: JsonTypes, close: KeyClose) -> str | None:
        """The value and its closing tag; None where this kind of key cannot hold one."""
        if close.value == "text":
            return self._texts.value(member.schema, STRING_TYPE, self._part.value_close) if "string" in kinds else None
        if close.value == "json":
            fit = kinds & close.kinds - STRING_TYPE
            return self._json(member, fit) if fit else None
        if "string" not in kinds:
            return self._json(member, kinds)
        return self._texts.value(member.schema, kinds, self._part.value_close)

    def _json(self, member: SchemaMember, kinds: JsonTypes) -> str:
        schema = self._scope.enclosed(member.schema)
        if kinds != ANY_TYPE and not _states_type(schema, kinds):
            schema = self._scope.enclosed({"allOf": [member.schema, {"type": sorted(kinds)}]})
        return lark_sequence([self._rules.json(schema, lenient=not self._scope.strict), self._closing()])

    def _closing(self) -> str:
        return self._rules.literal(self._part.frame + self._part.value_close)


def _states_type(schema: Any, kinds: JsonTypes) -> bool:
    stated = schema.get("type") if isinstance(schema, Mapping) else None
    return frozenset({stated} if isinstance(stated, str) else stated or ()) == kinds


class ElementRules:
    """Writes the rules of one tool's arguments."""

    def __init__(self, rules: LarkRules, part: Elements, scope: SchemaScope) -> None:
        self._rules, self._part, self._scope = rules, part, scope
        self._texts = TextValueRules(rules, scope, [pattern_anywhere(exact_pattern(part.mark))])
        self._values = SchemaRules(rules)

    def arguments(self) -> str:
        """All of them, and what ends them."""
        root = self._scope.root
        inside = self._members(object_members(root, self._scope), ValueSchema.arguments(root))
        if inside is None:
            inside = self._rules.rule(self._json({"type": "object", **root}))
        return lark_sequence([inside, self._rules.literal(self._part.end)])

    def _members(self, found: ObjectMembers, value_schema: ValueSchema) -> str | None:
        """An object's elements; None where they have names that make no tags, or any."""
        if found.others is not None or not all(self._part.can_name(one.name) for one in found.listed):
            return None
        each = [
            (self._element(one.name, one.schema, value_schema.member(one.name)), one.required) for one in found.listed
        ]
        return lark_sequence(element if required else lark_optional(element) for element, required in each)

    def _element(self, name: str, schema: Any, value_schema: ValueSchema) -> str:
        opening = self._rules.literal(self._part.opening(name))
        return self._rules.rule(lark_sequence([opening, self._value(schema, value_schema, self._part.closing(name))]))

    def _value(self, schema: Any, value_schema: ValueSchema, closing: str) -> str:
        """What stands between an element's tags, and the closing one."""
        context = (closing, *map(id, value_schema.schemas))
        return self._values.rule(
            schema, context, lambda: lark_choice(list(self._alternatives(schema, value_schema, closing)))
        )

    def _alternatives(self, schema: Any, value_schema: ValueSchema, closing: str) -> Iterator[str]:
        kinds, end = value_schema.kinds, self._rules.literal(closing)
        allowed = [one for one in schema_alternatives(schema, self._scope) if one.kind != "string"]
        clear = len(kinds & CONTAINER_TYPES) < 2
        if "string" in kinds:
            yield self._texts.value(schema, kinds, closing)
            nested = [self._nested(one, value_schema, least=1) for one in allowed if clear]
            yield from (lark_sequence([inside, end]) for inside in nested if inside is not None)
        elif clear and allowed:
            yield lark_sequence([lark_choice([self._of_kind(one, value_schema) for one in allowed]), end])
        else:
            yield lark_sequence([self._json(self._scope.enclosed(schema)), end])

    def _of_kind(self, one: SchemaAlternative, value_schema: ValueSchema) -> str:
        if (nested := self._nested(one, value_schema, least=0)) is not None:
            return nested
        if one.kind == "values":
            return lark_choice([self._rules.literal(json.dumps(value, ensure_ascii=False)) for value in one.values])
        return self._json(self._scope.enclosed({**one.keywords, "type": one.kind}))

    def _nested(self, one: SchemaAlternative, value_schema: ValueSchema, least: int) -> str | None:
        """The elements of an array, of `least` items, or object; None where it is neither or cannot be written so."""
        match one.kind:
            case "array":
                return self._items(one.keywords, value_schema, least)
            case "object":
                return self._members(object_members(one.keywords, self._scope), value_schema)
        return None

    def _items(self, keywords: Mapping[str, Any], value_schema: ValueSchema, least: int) -> str | None:
        least, most = max(least, int(keywords.get("minItems") or 0)), keywords.get("maxItems")
        if most is not None and int(most) < max(least, 1):
            return None
        item = self._element(self._part.item, keywords.get("items", True), value_schema.item(0))
        return f"({item}){{{least},{'' if most is None else int(most)}}}"

    def _json(self, schema: Any) -> str:
        return self._rules.json(schema, lenient=not self._scope.strict)


_TYPE_WORDS = {"null": ("null",), "boolean": ("true", "false")}


class TextValueRules:
    """`without` are patterns of what would end a text; `frame` is written behind each."""

    def __init__(self, rules: LarkRules, scope: SchemaScope, without: Sequence[str], frame: str = "") -> None:
        self._rules, self._scope, self._frame = rules, scope, frame
        self._texts = StringRules(rules, scope, without)

    def value(self, schema: Any, kinds: JsonTypes, closing: str) -> str:
        """A value of this schema which the parser takes for one of `kinds`, a string among them, and `closing`."""
        return self._text(schema, closing) if kinds == STRING_TYPE else self._mixed(schema, kinds, closing)

    def _text(self, schema: Any, closing: str) -> str:
        """A string, as it stands."""
        strings = _string_alternatives(schema_alternatives(schema, self._scope))
        if all(one.kind == "values" for one in strings):
            return self._one_of_values([value for one in strings for value in one.values], STRING_TYPE, closing)
        return self._until(closing, strings)

    def _mixed(self, schema: Any, kinds: JsonTypes, closing: str) -> str:
        """A string or something else: text in the form of the other is read as that."""
        allowed = schema_alternatives(schema, self._scope)
        if all(one.kind == "values" for one in allowed):
            return self._one_of_values([value for one in allowed for value in one.values], kinds, closing)
        strings, others = (
            _string_alternatives(allowed),
            [one for one in allowed if one.kind not in ("string", "values")],
        )
        if {one.kind for one in others} <= {"null", "boolean"}:
            # These have few values, which no text is that the strings allow and that would be read otherwise.
            words = [word for one in others for word in _TYPE_WORDS[one.kind]]
            return self._until(closing, [*strings, SchemaAlternative("values", {}, tuple(words))])
        narrowed = next((key for one in allowed for key in (*one.keywords, *(["enum"] if one.values else []))), None)
        if narrowed is not None:
            self._scope.refuse({narrowed: None}, frozenset())
        return self._until(closing, [SchemaAlternative("string", {})])

    def _one_of_values(self, values: list[Any], kinds: JsonTypes, closing: str) -> str:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        for value, text in zip(values, texts, strict=True):
            if closing in text or _read_back(text, kinds, self._frame) != value:
                raise Unsupported(f"The value {text!r} of an enum cannot be written in this model's tool format.")
        return lark_sequence(
            [lark_choice([self._rules.literal(text) for text in texts]), self._rules.literal(self._frame + closing)]
        )

    def _until(self, closing: str, strings: list[SchemaAlternative]) -> str:
        """One of the texts up to the closing tag, which they cannot hold."""
        return self._texts.until(self._frame + closing, strings)


def _string_alternatives(allowed: list[SchemaAlternative]) -> list[SchemaAlternative]:
    """Those that are strings, and of an enum those values that are."""
    found = [one for one in allowed if one.kind == "string"]
    values = tuple(value for one in allowed for value in one.values if isinstance(value, str))
    return [*found, SchemaAlternative("values", {}, values)] if values else found


def _read_back(text: str, kinds: JsonTypes, frame: str) -> Any:
    """What the parser makes of a text."""
    written: list[str] = []
    value = TextValue(kinds, frame, written.append)
    value.write(frame + text + frame)
    value.close()
    return json.loads("".join(written))
