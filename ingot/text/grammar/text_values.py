"""Values that are written as text up to a closing tag, and may be strings: text as the parser reads it back to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ingot.errors import Unsupported
from ingot.text.grammar.json_schema import Alternative, Texts, alternatives
from ingot.text.grammar.lark import Rules, one_of, sequence
from ingot.text.grammar.members import Scope
from ingot.text.parse.text_values import TextValue
from ingot.text.parser.arguments import STRING, JsonTypes

_WORDS = {"null": ("null",), "boolean": ("true", "false")}


class TextValueWriter:
    """`without` are patterns of what would end a text; `frame` is written behind each."""

    def __init__(self, rules: Rules, scope: Scope, without: Sequence[str], frame: str = "") -> None:
        self._rules, self._scope, self._frame = rules, scope, frame
        self._texts = Texts(rules, scope, without)

    def value(self, schema: Any, kinds: JsonTypes, closing: str) -> str:
        """A value of this schema which the parser takes for one of `kinds`, a string among them, and `closing`."""
        return self._text(schema, closing) if kinds == STRING else self._mixed(schema, kinds, closing)

    def _text(self, schema: Any, closing: str) -> str:
        """A string, as it stands."""
        strings = _strings(alternatives(schema, self._scope))
        if all(one.kind == "values" for one in strings):
            return self._one_of_values([value for one in strings for value in one.values], STRING, closing)
        return self._until(closing, strings)

    def _mixed(self, schema: Any, kinds: JsonTypes, closing: str) -> str:
        """A string or something else: text that looks like the other is read as that."""
        allowed = alternatives(schema, self._scope)
        if all(one.kind == "values" for one in allowed):
            return self._one_of_values([value for one in allowed for value in one.values], kinds, closing)
        strings, others = _strings(allowed), [one for one in allowed if one.kind not in ("string", "values")]
        if {one.kind for one in others} <= {"null", "boolean"}:
            # These have few values, which no text is that the strings allow and that would be read otherwise.
            words = [word for one in others for word in _WORDS[one.kind]]
            return self._until(closing, [*strings, Alternative("values", {}, tuple(words))])
        narrowed = next((key for one in allowed for key in (*one.says, *(["enum"] if one.values else []))), None)
        if narrowed is not None:
            self._scope.refuse({narrowed: None}, frozenset())
        return self._until(closing, [Alternative("string", {})])

    def _one_of_values(self, values: list[Any], kinds: JsonTypes, closing: str) -> str:
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        for value, text in zip(values, texts, strict=True):
            if closing in text or _read(text, kinds, self._frame) != value:
                raise Unsupported(f"The value {text!r} of an enum cannot be written in this model's tool format.")
        return sequence(
            [one_of([self._rules.literal(text) for text in texts]), self._rules.literal(self._frame + closing)]
        )

    def _until(self, closing: str, strings: list[Alternative]) -> str:
        """One of the texts up to the closing tag, which they cannot hold."""
        return self._texts.until(self._frame + closing, strings)


def _strings(allowed: list[Alternative]) -> list[Alternative]:
    """Those that are strings, and of an enum those values that are."""
    found = [one for one in allowed if one.kind == "string"]
    values = tuple(value for one in allowed for value in one.values if isinstance(value, str))
    return [*found, Alternative("values", {}, values)] if values else found


def _read(text: str, kinds: JsonTypes, frame: str) -> Any:
    """What the parser makes of a text."""
    written: list[str] = []
    value = TextValue(kinds, frame, written.append)
    value.write(frame + text + frame)
    value.close()
    return json.loads("".join(written))
