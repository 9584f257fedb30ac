"""Rules by the schemas that they are for: each made once, also where a schema leads back to itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ingot.text.grammar.lark import Rules


class SchemaRules:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._names: dict[tuple[Hashable, ...], str] = {}
        self._under_way: set[str] = set()
        self._led_back: set[str] = set()
        self._schemas: list[Any] = []  # those whose ids are keys, which nothing else may then have

    def rule(self, schema: Any, place: tuple[Hashable, ...], write: Callable[[], str]) -> str:
        """The rule of this very schema in this place, which `write` makes, perhaps asking for it again."""
        key = (id(schema), *place)
        if key not in self._names:
            self._schemas.append(schema)
            self._names[key] = self._made(key, write)
        name = self._names[key]
        if name in self._under_way:
            self._led_back.add(name)
        return name

    def _made(self, key: tuple[Hashable, ...], write: Callable[[], str]) -> str:
        name = self._names[key] = self._rules.reserve()
        self._under_way.add(name)
        body = write()
        self._under_way.remove(name)
        if name not in self._led_back:
            return self._rules.rule(body)
        self._rules.define(name, body)
        return name
