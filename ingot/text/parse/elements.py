"""Reads arguments that are written as elements in elements, each of the type that its tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ingot.text.formats.notation import JSON
from ingot.text.formats.table import Elements
from ingot.text.parse.call_events import Draft, Mismatch, Teller
from ingot.text.parse.events import ToolSchema
from ingot.text.parse.reader import Steps, TextReader, markers
from ingot.text.parse.schema_types import CONTAINERS, Described, JsonType, JsonTypes
from ingot.text.parse.text_values import TextValue
from ingot.text.parse.transcript import transcribed

DEEPEST = 64
"""Elements within one another."""
LONGEST_NAME = 1024
LONGEST_UNOPENED = 65536
"""Of a value whose opening tag was forgotten, which is held until it is named."""

_EMPTY: tuple[tuple[JsonType, str], ...] = (("array", "[]"), ("object", "{}"), ("null", "null"))


class ElementReader:
    def __init__(self, reader: TextReader, tools: Mapping[str, ToolSchema], teller: Teller) -> None:
        self._reader = reader
        self._tools = tools
        self._teller = teller

    def read(self, part: Elements, draft: Draft, closing: tuple[str, ...]) -> Steps[None]:
        """All of a call's. `closing` are the literals of the form's closing. Raises Mismatch."""
        reader, ends = self._reader, (part.end, *closing)
        yield from reader.gap()
        if (yield from reader.sees(part.mark)):
            self._teller.begin(draft)
            yield from _Values(reader, self._teller, part).arguments(self._described(draft), ends)
            self._teller.end(draft)
        elif (yield from reader.sees("{")):
            self._teller.begin(draft)
            yield from transcribed(reader, JSON, self._teller.fragment)
            self._teller.end(draft)
            yield from reader.gap()
            if (yield from reader.one_of(ends)) is None:
                raise Mismatch
            reader.record()
        else:
            raise Mismatch

    def _described(self, draft: Draft) -> Described:
        tool = self._tools.get(draft.name)
        return Described.arguments(tool.parameters if tool is not None else {})


class _Values:
    """One call's."""

    def __init__(self, reader: TextReader, teller: Teller, part: Elements) -> None:
        self._reader = reader
        self._tell = teller.fragment
        self._part = part

    def arguments(self, described: Described, ends: tuple[str, ...]) -> Steps[None]:
        yield from self._members((yield from self._next(ends)), described, ends, 0)

    def _next(self, ends: tuple[str, ...]) -> Steps[str | None]:
        """Passes the tag that opens another element, and gives its name: None where one of `ends` came instead."""
        reader = self._reader
        reader.record()
        yield from reader.gap()
        if (yield from reader.one_of(ends)) is not None:
            reader.forget()
            return None
        if not (yield from reader.literal(self._part.mark)):
            raise Mismatch
        if (yield from reader.literal("<")):
            name = yield from self._name()
        else:
            name = yield from self._unopened()
        reader.forget()
        return name

    def _name(self) -> Steps[str]:
        found = yield from self._reader.until(markers(">"), LONGEST_NAME)
        if found is None or not self._part.can_name(found[0]):
            raise Mismatch
        return found[0]

    def _unopened(self) -> Steps[str]:
        """The name of an element without its opening tag, which the closing one tells: to that, it is put back."""
        reader, mark = self._reader, self._part.mark
        found = (yield from reader.until(markers(mark), LONGEST_UNOPENED)) if self._part.open_optional else None
        if found is None or not (yield from reader.literal("</")):
            raise Mismatch
        name = yield from self._name()
        reader.unread(found[0] + self._part.closing(name))
        return name

    def _members(self, name: str | None, described: Described, ends: tuple[str, ...], depth: int) -> Steps[None]:
        """An object, whose first member's tag was passed."""
        self._tell("{")
        between = ""
        while name is not None:
            self._tell(f"{between}{json.dumps(name, ensure_ascii=False)}: ")
            yield from self._value(name, described.member(name), depth)
            name = yield from self._next(ends)
            between = ", "
        self._tell("}")

    def _items(self, name: str | None, described: Described, ends: tuple[str, ...], depth: int) -> Steps[None]:
        """An array, whose first item's tag was passed. What the schema says is one has no members, by any name."""
        self._tell("[")
        index = 0
        while name is not None:
            self._tell(", " if index else "")
            yield from self._value(name, described.item(index), depth)
            name = yield from self._next(ends)
            index += 1
        self._tell("]")

    def _value(self, name: str, described: Described, depth: int) -> Steps[None]:
        """What stands between an element's tags, and the closing one."""
        kinds, closing = described.kinds, self._part.closing(name)
        space = ""
        if kinds & CONTAINERS or "string" not in kinds:
            space = yield from self._reader.gap()
            if "string" not in kinds and (yield from self._reader.literal(closing)):
                self._tell(next((empty for kind, empty in _EMPTY if kind in kinds), '""'))
                return
            if (yield from self._nests(kinds)):
                yield from self._nested(described, closing, depth + 1)
                return
        yield from self._text(kinds, closing, space)

    def _nests(self, kinds: JsonTypes) -> Steps[bool]:
        """Whether an element comes next. A string may begin with a mark too."""
        mark = self._part.mark
        opens = f"{mark}<" if "string" in kinds else mark
        return (yield from self._reader.sees(opens)) and not (yield from self._reader.sees(f"{mark}</"))

    def _nested(self, described: Described, closing: str, depth: int) -> Steps[None]:
        if depth > DEEPEST:
            raise Mismatch
        first = yield from self._next((closing,))
        told = described.kinds & CONTAINERS
        is_array = "array" in told if len(told) == 1 else first == self._part.item
        yield from (self._items if is_array else self._members)(first, described, (closing,), depth)

    def _text(self, kinds: JsonTypes, closing: str, space: str) -> Steps[None]:
        """A value that has no elements, and its closing tag: one that another tag follows."""
        reader, mark = self._reader, self._part.mark
        value = TextValue(kinds, "", self._tell)
        value.write(space)
        last: list[str] = []  # the text's end, which may be half a closing tag

        def write(text: str) -> None:
            if reader.ended:
                last.append(text)
            else:
                value.write(text)

        while (yield from reader.scan(markers(closing), write)) is not None:
            value.write("".join(last))
            last.clear()
            reader.advance(reader.at + len(closing))
            if value.in_json_string:
                value.write(closing)
                continue
            space = yield from reader.gap()
            if (yield from reader.sees(mark)) or reader.cut_short((mark,)):
                value.close()
                return
            value.write(closing + space)
        raise Mismatch
