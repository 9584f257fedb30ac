"""Reads arguments that are written as elements in elements, each of the type that its tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from ingot.text.formats.notation import JSON
from ingot.text.parse.events import ToolSchema
from ingot.text.parse.text_values import TextValue
from ingot.text.parse.transcript import transcribed
from ingot.text.parser.arguments import CONTAINERS, Described, JsonType, JsonTypes
from ingot.text.parser.events import Draft, Mismatch, Teller
from ingot.text.parser.reader import Steps, TextReader, markers
from ingot.text.parser.unclosed_tags import CallHeads, Doubts, ValueMarkers
from ingot.text.tool_formats.format import Elements

DEEPEST = 64
"""Elements within one another."""
LONGEST_NAME = 1024
LONGEST_UNOPENED = 65536
"""Of a value whose opening tag was forgotten, which is held until it is named."""

_EMPTY: tuple[tuple[JsonType, str], ...] = (("array", "[]"), ("object", "{}"), ("null", "null"))


class ElementReader:
    def __init__(self, reader: TextReader, tools: Mapping[str, ToolSchema], teller: Teller, heads: CallHeads) -> None:
        self._reader = reader
        self._tools = tools
        self._teller = teller
        self._heads = heads
        self._doubts = Doubts(reader)

    def read(self, part: Elements, draft: Draft, closing: tuple[str, ...]) -> Steps[None]:
        """All of a call's. `closing` are the literals of the form's closing. Raises Mismatch."""
        reader, ends = self._reader, (part.end, *closing)
        yield from reader.gap()
        if (yield from reader.sees(part.mark)):
            self._teller.begin(draft)
            values = _Values(reader, self._teller.fragment, part, self._heads, self._doubts, closing, draft)
            yield from values.arguments(self._described(draft), ends)
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
    """One call's.

    Where closing tags were forgotten, an argument that is text ends before the end of its call that another end or the
    answer's confirms, and before another call, as that of tagged parameters does. An object or array breaks there.
    """

    def __init__(
        self,
        reader: TextReader,
        tell: Callable[[str], None],
        part: Elements,
        heads: CallHeads,
        doubts: Doubts,
        closing: tuple[str, ...],
        draft: Draft,
    ) -> None:
        self._reader, self._tell, self._part = reader, tell, part
        self._heads, self._doubts, self._closing = heads, doubts, closing
        self._draft = draft

    def arguments(self, described: Described, ends: tuple[str, ...]) -> Steps[None]:
        yield from self._members((yield from self._next(ends, 0)), described, ends, 0)

    def _next(self, ends: tuple[str, ...], depth: int) -> Steps[str | None]:
        """Passes the tag that opens another element, and gives its name: None where one of `ends` came instead, or
        another call, before which the arguments end."""
        reader = self._reader
        reader.record()
        yield from reader.gap()
        if (yield from reader.one_of(ends)) is not None:
            reader.forget()
            return None
        if not self._draft.strict and (yield from self._within(self._part.end).head(reader)):
            if depth:
                self._break()
            return None
        if not (yield from reader.literal(self._part.mark)):
            raise Mismatch
        if (yield from reader.literal("<")):
            name = yield from self._name()
        else:
            name = yield from self._unopened()
        reader.forget()
        return name

    def _within(self, close: str) -> ValueMarkers:
        return ValueMarkers(self._heads, close, self._part.end, self._closing, self._part.mark)

    def _break(self) -> None:
        """What comes next is to be read by itself."""
        self._draft.goes_on = True
        self._reader.record()
        raise Mismatch

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
            name = yield from self._next(ends, depth)
            between = ", "
        self._tell("}")

    def _items(self, name: str | None, described: Described, ends: tuple[str, ...], depth: int) -> Steps[None]:
        """An array, whose first item's tag was passed. What the schema says is one has no members, by any name."""
        self._tell("[")
        index = 0
        while name is not None:
            self._tell(", " if index else "")
            yield from self._value(name, described.item(index), depth)
            name = yield from self._next(ends, depth)
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
        yield from self._text(kinds, closing, space, depth)

    def _nests(self, kinds: JsonTypes) -> Steps[bool]:
        """Whether an element comes next. A string may begin with a mark too."""
        mark = self._part.mark
        opens = f"{mark}<" if "string" in kinds else mark
        return (yield from self._reader.sees(opens)) and not (yield from self._reader.sees(f"{mark}</"))

    def _nested(self, described: Described, closing: str, depth: int) -> Steps[None]:
        if depth > DEEPEST:
            raise Mismatch
        first = yield from self._next((closing,), depth)
        told = described.kinds & CONTAINERS
        is_array = "array" in told if len(told) == 1 else first == self._part.item
        yield from (self._items if is_array else self._members)(first, described, (closing,), depth)

    def _text(self, kinds: JsonTypes, closing: str, space: str, depth: int) -> Steps[None]:
        """A value that has no elements, and its closing tag: one that another tag follows."""
        reader, mark, within = self._reader, self._part.mark, self._within(closing)
        value = TextValue(kinds, "", self._tell)
        value.write(space)
        last: list[str] = []  # the text's end, which may be half a closing tag
        strays = False  # the value holds markers that neither end it nor begin a call
        wanted = markers(closing, self._part.end, *self._closing, *self._heads.literals)

        def write(text: str) -> None:
            if reader.ended:
                last.append(text)
            else:
                value.write(text)

        while (marker := (yield from reader.scan(wanted, write))) is not None:
            value.write("".join(last))
            last.clear()
            if value.in_json_string:
                value.write(reader.advance(reader.at + 1))
            elif marker == closing:
                reader.advance(reader.at + len(closing))
                space = yield from reader.gap()
                if (yield from reader.sees(mark)) or reader.cut_short((mark,)):
                    value.close()
                    return
                value.write(closing + space)
                strays = True
            elif not (yield from self._forgotten(marker, within)):
                value.write(reader.advance(reader.at + 1))
                strays = True
            elif value.may_be_text and (yield from self._goes_on(value, closing, within)):
                continue
            elif strays or depth:
                self._break()
            else:
                value.close(forgotten=True)
                return
        raise Mismatch

    def _forgotten(self, marker: str, within: ValueMarkers) -> Steps[bool]:
        if self._draft.strict:
            return False
        if marker in self._heads.literals:
            return (yield from within.head(self._reader)) > 0
        return (yield from within.ends_call(self._reader, marker))

    def _goes_on(self, value: TextValue, closing: str, within: ValueMarkers) -> Steps[bool]:
        closes = within.closes(self._reader, closing, lambda ahead: False)
        return (yield from self._doubts.goes_on(closes, value, within.all))
