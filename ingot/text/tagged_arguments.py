"""Reads arguments that are written as text between tags, each turned into the type that its tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ingot.text.formats.format import KeyClose, TextParameters
from ingot.text.parameters import TextValue
from ingot.text.parsed import ToolSchema
from ingot.text.reader import Reader, Steps, markers
from ingot.text.schema_types import ANY, STRING, Kinds, parameter_kinds
from ingot.text.telling import Draft, Mismatch, Teller

LONGEST_KEY = 1024


class TaggedArgumentReader:
    def __init__(self, reader: Reader, tools: Mapping[str, ToolSchema], teller: Teller) -> None:
        self._reader = reader
        self._tools = tools
        self._teller = teller

    def read(self, part: TextParameters, draft: Draft, closing: tuple[str, ...]) -> Steps[None]:
        """All of a call's. `closing` are the literals of the form's closing. Raises Mismatch."""
        following = (part.key_open, part.end, *closing)
        yield from self._reader.gap()
        found = yield from self._reader.one_of(following)
        if found is None:
            raise Mismatch
        self._teller.begin(draft)
        separator = "{"
        while found == part.key_open:
            key, close = yield from self._key(part)
            self._teller.fragment(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            found = yield from self._value(part, self._kinds(draft, key, close), following)
        self._teller.fragment("{}" if separator == "{" else "}")
        self._teller.end(draft)

    def _key(self, part: TextParameters) -> Steps[tuple[str, KeyClose]]:
        self._reader.record(part.key_open)
        found = yield from self._reader.until(markers(*(close.text for close in part.key_closes)), LONGEST_KEY)
        if found is None:
            raise Mismatch
        if part.value_open:
            yield from self._reader.gap()
            if not (yield from self._reader.literal(part.value_open)):
                raise Mismatch
        self._reader.forget()
        key, text = found
        return key, next(close for close in part.key_closes if close.text == text)

    def _kinds(self, draft: Draft, key: str, close: KeyClose) -> Kinds:
        if close.value == "text":
            return STRING
        if close.value == "json":
            return ANY - STRING
        tool = self._tools.get(draft.name)
        return parameter_kinds(tool.parameters, key) if tool is not None else ANY

    def _value(self, part: TextParameters, kinds: Kinds, following: tuple[str, ...]) -> Steps[str]:
        """One value, and the literal that follows its closing tag: only with one does the tag close it."""
        reader = self._reader
        value = TextValue(kinds, part.frame, self._teller.fragment)
        last: list[str] = []  # the text's end, which may be half a closing tag

        def write(text: str) -> None:
            if reader.ended:
                last.append(text)
            else:
                value.write(text)

        while (yield from reader.scan(markers(part.value_close), write)) is not None:
            value.write("".join(last))
            last.clear()
            reader.advance(reader.at + len(part.value_close))
            if value.in_json_string:
                value.write(part.value_close)
                continue
            space = yield from reader.gap()
            if (found := (yield from reader.one_of(following))) is not None:
                value.close()
                return found
            if reader.cut_short(following):
                value.close()
                raise Mismatch
            value.write(part.value_close + space)
        raise Mismatch
