"""Arguments as elements in elements, in the way that the parser reads them back to values of their schemas' types.

The closing tag repeats the opening one's name, so a grammar can hold only to names that the schema lists. An object of
any others is written as JSON, which the parser reads in its place; so is what could be an array or an object, as
without items or members the two look the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.text.grammar.json_schema import Alternative, alternatives
from ingot.text.grammar.lark import Rules, anywhere, exactly, one_of, optional, sequence
from ingot.text.grammar.members import Members, Scope, members
from ingot.text.grammar.schema_rules import SchemaRules
from ingot.text.grammar.text_values import TextValueWriter
from ingot.text.parser.arguments import CONTAINERS, Described
from ingot.text.tool_formats.format import Elements


class ElementWriter:
    """Writes the rules of one tool's arguments."""

    def __init__(self, rules: Rules, part: Elements, scope: Scope) -> None:
        self._rules, self._part, self._scope = rules, part, scope
        self._texts = TextValueWriter(rules, scope, [anywhere(exactly(part.mark))])
        self._values = SchemaRules(rules)

    def arguments(self) -> str:
        """All of them, and what ends them."""
        root = self._scope.root
        inside = self._members(members(root, self._scope), Described.arguments(root))
        if inside is None:
            inside = self._rules.rule(self._json({"type": "object", **root}))
        return sequence([inside, self._rules.literal(self._part.end)])

    def _members(self, found: Members, described: Described) -> str | None:
        """An object's elements; None where they have names that make no tags, or any."""
        if found.others is not None or not all(self._part.can_name(one.name) for one in found.listed):
            return None
        each = [(self._element(one.name, one.schema, described.member(one.name)), one.required) for one in found.listed]
        return sequence(element if required else optional(element) for element, required in each)

    def _element(self, name: str, schema: Any, described: Described) -> str:
        opening = self._rules.literal(self._part.opening(name))
        return self._rules.rule(sequence([opening, self._value(schema, described, self._part.closing(name))]))

    def _value(self, schema: Any, described: Described, closing: str) -> str:
        """What stands between an element's tags, and the closing one."""
        place = (closing, *map(id, described.schemas))
        return self._values.rule(schema, place, lambda: one_of(list(self._ways(schema, described, closing))))

    def _ways(self, schema: Any, described: Described, closing: str) -> Iterator[str]:
        kinds, end = described.kinds, self._rules.literal(closing)
        allowed = [one for one in alternatives(schema, self._scope) if one.kind != "string"]
        clear = len(kinds & CONTAINERS) < 2
        if "string" in kinds:
            yield self._texts.value(schema, kinds, closing)
            nested = [self._nested(one, described, least=1) for one in allowed if clear]
            yield from (sequence([inside, end]) for inside in nested if inside is not None)
        elif clear and allowed:
            yield sequence([one_of([self._of_kind(one, described) for one in allowed]), end])
        else:
            yield sequence([self._json(self._scope.enclosed(schema)), end])

    def _of_kind(self, one: Alternative, described: Described) -> str:
        if (nested := self._nested(one, described, least=0)) is not None:
            return nested
        if one.kind == "values":
            return one_of([self._rules.literal(json.dumps(value, ensure_ascii=False)) for value in one.values])
        return self._json(self._scope.enclosed({**one.says, "type": one.kind}))

    def _nested(self, one: Alternative, described: Described, least: int) -> str | None:
        """The elements of an array, of `least` items, or object; None where it is neither or cannot be written so."""
        match one.kind:
            case "array":
                return self._items(one.says, described, least)
            case "object":
                return self._members(members(one.says, self._scope), described)
        return None

    def _items(self, says: Mapping[str, Any], described: Described, least: int) -> str | None:
        least, most = max(least, int(says.get("minItems") or 0)), says.get("maxItems")
        if most is not None and int(most) < max(least, 1):
            return None
        item = self._element(self._part.item, says.get("items", True), described.item(0))
        return f"({item}){{{least},{'' if most is None else int(most)}}}"

    def _json(self, schema: Any) -> str:
        return self._rules.json(schema, lenient=not self._scope.strict)
