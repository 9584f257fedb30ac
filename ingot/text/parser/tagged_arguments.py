"""Arguments between tags, each of the type that its tool's schema asks for.

`TaggedArgumentReader` reads parameters that are text between tags, one after another. `ElementArgumentReader` reads
elements in elements, in which objects and arrays are tags too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from ingot.text.parser.arguments import (
    ANY_TYPE,
    CONTAINER_TYPES,
    STRING_TYPE,
    JsonType,
    JsonTypes,
    ValueSchema,
    parameter_types,
)
from ingot.text.parser.events import CallDraft, CallEventEmitter, FormMismatch, ToolSchema
from ingot.text.parser.reader import Steps, TextReader, make_markers
from ingot.text.parser.unclosed_tags import CallHeads, UnclosedValues, ValueMarkers
from ingot.text.parser.values import TextValue, transcribe_object
from ingot.text.tool_formats.format import JSON, Elements, KeyClose, TextParameters

LONGEST_KEY = 1024


class TaggedArgumentReader:
    def __init__(
        self, reader: TextReader, tools: Mapping[str, ToolSchema], teller: CallEventEmitter, heads: CallHeads
    ) -> None:
        self._reader = reader
        self._tools = tools
        self._teller = teller
        self._heads = heads
        self._doubts = UnclosedValues(reader)

    def read(
        self, part: TextParameters, draft: CallDraft, own: tuple[str, ...], closing: tuple[str, ...]
    ) -> Steps[None]:
        """All of a call's. `own` are the literals that follow in the call, which are not passed, and `closing` those of
        the form's closing. Raises Mismatch."""
        closing = (*own, *closing)
        following = (part.key_open, part.end, *closing)
        yield from self._reader.gap()
        if part.object_tags and (yield from self._reader.literal(part.object_tags[0])):
            yield from self._reader.gap()
            if not (yield from self._reader.sees("{")):
                raise FormMismatch
            self._teller.begin(draft)
            yield from self._object(draft)
            yield from self._ending((part.object_tags[1],))
            yield from self._ending((part.end, *closing))
            return
        if (yield from self._reader.sees("{")):
            self._teller.begin(draft)
            yield from self._object(draft)
            yield from self._ending((part.end, *closing))
            return
        found = yield from self._reader.one_of(following)
        if found is None:
            raise FormMismatch
        self._teller.begin(draft)
        within = ValueMarkers(self._heads, part.value_close, part.end, closing, part.key_open)
        given: set[str] = set()
        while found == part.key_open:
            key, close = yield from self._key(part, within, draft)
            if not given and (yield from self._wrapped(part, draft, key)):
                yield from self._wrapped_object(draft, key, close)
                yield from self._ending((part.value_close,))
                yield from self._ending((part.end, *closing))
                return
            found = yield from self._valueless(part, following)
            if found is None:
                self._teller.fragment(f"{', ' if given else '{'}{json.dumps(key, ensure_ascii=False)}: ")
                given.add(key)
                value = TextValue(self._kinds(draft, key, close), part.frame, self._teller.fragment)
                missing = self._missing(part, draft, given)
                found = yield from _TaggedValueReader(
                    self._reader, self._doubts, part, within, missing, value, draft
                ).read()
        self._teller.fragment("}" if given else "{}")
        self._teller.end(draft)
        if found in (*own, *self._heads.ends):
            self._reader.unread(found)

    def _object(self, draft: CallDraft) -> Steps[None]:
        yield from transcribe_object(self._reader, JSON, self._teller.fragment)
        self._teller.end(draft)

    def _wrapped_object(self, draft: CallDraft, key: str, close: KeyClose) -> Steps[None]:
        """An object under a name that is no parameter: all the arguments if the tool has such parameters, else the
        value that it seems to be."""
        read: list[str] = []
        try:
            yield from transcribe_object(self._reader, JSON, read.append)
        except FormMismatch:
            self._teller.fragment("".join(read))
            raise
        text = "".join(read)
        unknown = json.loads(text).keys() - self._properties(draft)
        value = json.dumps(text, ensure_ascii=False) if close.value == "text" else text
        self._teller.fragment(f"{{{json.dumps(key)}: {value}}}" if unknown else text)
        self._teller.end(draft)

    def _ending(self, literals: tuple[str, ...]) -> Steps[None]:
        yield from self._reader.gap()
        if (yield from self._reader.one_of(literals)) is None:
            raise FormMismatch
        self._reader.record()

    def _wrapped(self, part: TextParameters, draft: CallDraft, key: str) -> Steps[bool]:
        """Whether the value of this key, which is none of the tool's, is all the arguments."""
        if key not in part.wrappers or draft.name not in self._tools or key in self._properties(draft):
            return False
        yield from self._reader.gap()
        return (yield from self._reader.sees("{"))

    def _properties(self, draft: CallDraft) -> frozenset[str]:
        tool = self._tools.get(draft.name)
        listed = tool.parameters.get("properties") if tool is not None else None
        return frozenset(listed) if isinstance(listed, Mapping) else frozenset()

    def _missing(self, part: TextParameters, draft: CallDraft, given: set[str]) -> tuple[str, ...]:
        keys = self._properties(draft) - given
        return tuple(f"{part.key_open}{key}{close.text}" for key in keys for close in part.key_closes)

    def _key(self, part: TextParameters, within: ValueMarkers, draft: CallDraft) -> Steps[tuple[str, KeyClose]]:
        """A key. At a marker of calls within it, what was to close it is missing, and the call breaks."""
        reader = self._reader
        reader.record(part.key_open)
        closes = {close.text: close for close in part.key_closes}
        reader.start_lookahead()
        found = yield from reader.until(within.also(*closes), LONGEST_KEY)
        if found is not None and found[1] in closes:
            reader.keep_lookahead()
            key, close = found[0], closes[found[1]]
            stated = yield from self._stated_type(part)
            return key, close if stated is None else replace(close, kinds=stated)
        if found is not None:
            reader.undo_lookahead()
            reader.advance(reader.at + len(found[0]))
            draft.goes_on = True
        else:
            reader.keep_lookahead()
        raise FormMismatch

    def _stated_type(self, part: TextParameters) -> Steps[JsonTypes | None]:
        """The type that stands before a value, if one does and means anything: `array[string]` is an array."""
        if part.type_tags is None:
            return None
        yield from self._reader.gap()
        if not (yield from self._reader.literal(part.type_tags[0])):
            return None
        found = yield from self._reader.until(make_markers(part.type_tags[1]), LONGEST_KEY)
        if found is None:
            raise FormMismatch
        return JsonTypes(kind for kind in ANY_TYPE if kind == found[0].split("[")[0].strip().lower()) or None

    def _valueless(self, part: TextParameters, following: tuple[str, ...]) -> Steps[str | None]:
        """What follows a key that has no value; None where one has begun."""
        found: str | None = None
        if part.value_open:
            yield from self._reader.gap()
            if not (yield from self._reader.literal(part.value_open)):
                found = yield from self._reader.one_of(following)
                if found is None:
                    raise FormMismatch
        self._reader.forget()
        return found

    def _kinds(self, draft: CallDraft, key: str, close: KeyClose) -> JsonTypes:
        if close.value == "text":
            return STRING_TYPE
        if close.value == "json":
            return close.kinds - STRING_TYPE
        tool = self._tools.get(draft.name)
        kinds = parameter_types(tool.parameters, key) if tool is not None else ANY_TYPE
        return close.kinds if kinds == ANY_TYPE else kinds


class _TaggedValueReader:
    """One value.

    A closing tag closes it only where the next parameter, the end of the call or of its form follows. Where one was
    forgotten, the value ends before a parameter that the tool has and that was not given yet (`missing`), before an end
    of the call that another end or the answer's confirms, and before another call: unless it is a text that goes on
    behind them, and that its own tags close later. Within a string of a value that is JSON nothing ends it, unless the
    string is never closed. Of a strict tool's call a grammar saw to the tags.
    """

    def __init__(
        self,
        reader: TextReader,
        doubts: UnclosedValues,
        part: TextParameters,
        within: ValueMarkers,
        missing: tuple[str, ...],
        value: TextValue,
        draft: CallDraft,
    ) -> None:
        self._reader, self._doubts, self._part = reader, doubts, part
        self._within, self._missing = within, missing
        self._value, self._draft = value, draft
        self._close = part.value_close
        self._wanted = within.all
        self._last: list[str] = []  # the text's end, which may be half a closing tag
        self._strays = False  # the value holds markers that neither end it nor begin a call

    def read(self) -> Steps[str]:
        """Passes the value and the literal that follows its closing tag, or ends it without one. Gives that literal;
        nothing where another call comes. Raises Mismatch."""
        reader, part = self._reader, self._part
        if part.quote and (yield from reader.literal(part.quote[0])):
            self._close = part.quote[1] + part.value_close
            self._wanted = self._within.also(self._close)
        while (marker := (yield from reader.scan(self._wanted, self._write))) is not None:
            self._value.write("".join(self._last))
            self._last.clear()
            if self._value.in_json_string:
                found = yield from self._in_string(marker)
            elif marker == self._close:
                found = yield from self._closed()
            else:
                found = yield from self._unclosed(marker)
            if found is not None:
                return found
        raise FormMismatch

    def _write(self, text: str) -> None:
        if self._reader.ended:
            self._last.append(text)
        else:
            self._value.write(text)

    def _in_string(self, marker: str) -> Steps[str | None]:
        reader, close = self._reader, self._close
        doubtful = marker == close and not self._draft.strict
        if not doubtful or not (yield from self._within.follows(reader, close)):
            self._value.write(reader.advance(reader.at + 1))
            return None
        closes = self._within.closes_json(reader, close, self._value.copy())
        if (yield from self._doubts.goes_on(closes, self._value, self._wanted)):
            return None
        return (yield from self._closed())

    def _closed(self) -> Steps[str | None]:
        reader, following = self._reader, self._within.following
        reader.advance(reader.at + len(self._close))
        space = yield from reader.gap()
        found = yield from reader.one_of(following)
        if found is not None or reader.cut_short(following):
            self._value.close()
            if found is None:
                raise FormMismatch
            return found
        tag = self._close + space
        if not self._draft.strict and (yield from self._within.head(reader)):
            if (yield from self._goes_on(tag)):
                return None
            self._end(tag)
            return ""
        self._strays = True
        self._value.write(tag)
        return None

    def _unclosed(self, marker: str) -> Steps[str | None]:
        reader = self._reader
        forgotten = yield from self._forgotten(marker)
        if forgotten == "no":
            self._strays = True
            self._value.write(reader.advance(reader.at + 1))
            return None
        if forgotten == "perhaps" and (yield from self._goes_on()):
            return None
        self._end()
        if marker in self._within.heads.literals:
            return ""
        return reader.advance(reader.at + len(marker))

    def _forgotten(self, marker: str) -> Steps[Literal["no", "perhaps", "surely"]]:
        """Whether a closing tag was forgotten before the marker."""
        reader, part, within = self._reader, self._part, self._within
        surely = False
        if marker == part.key_open:
            found = self._is_missing((yield from reader.ahead(max(map(len, self._missing), default=0))))
            surely = part.close_optional
        elif marker == part.end and part.close_optional and (yield from within.ends_form(reader)):
            found = surely = True
        elif marker in within.heads.literals:
            found = (yield from within.head(reader)) > 0
        else:
            found = marker != part.value_close and (yield from within.ends_call(reader, marker))
        if not found or (self._draft.strict and not surely):
            return "no"
        return "surely" if surely or not self._value.may_be_text else "perhaps"

    def _is_missing(self, ahead: str) -> bool:
        return any(map(ahead.startswith, self._missing))

    def _goes_on(self, tag: str = "") -> Steps[bool]:
        """Whether the value is a text that holds what comes next. It is then written, with the tag before it."""
        closes = self._within.closes(self._reader, self._close, self._is_missing)
        return (yield from self._doubts.goes_on(closes, self._value, self._wanted, tag))

    def _end(self, tag: str = "") -> None:
        """The value ends here, behind its closing tag if there is one. With stray markers in it, it is not what was
        meant: the call is broken, and what follows is read by itself."""
        if self._strays:
            self._draft.goes_on = True
            self._reader.record(tag)
            raise FormMismatch
        self._value.close(forgotten=not tag)


DEEPEST_ELEMENT = 64
"""Elements within one another."""
LONGEST_ELEMENT_NAME = 1024
LONGEST_UNOPENED_ELEMENT = 65536
"""Of a value whose opening tag was forgotten, which is held until it is named."""

_EMPTY_ELEMENTS: tuple[tuple[JsonType, str], ...] = (("array", "[]"), ("object", "{}"), ("null", "null"))


class ElementArgumentReader:
    def __init__(
        self, reader: TextReader, tools: Mapping[str, ToolSchema], teller: CallEventEmitter, heads: CallHeads
    ) -> None:
        self._reader = reader
        self._tools = tools
        self._teller = teller
        self._heads = heads
        self._doubts = UnclosedValues(reader)

    def read(self, part: Elements, draft: CallDraft, closing: tuple[str, ...]) -> Steps[None]:
        """All of a call's. `closing` are the literals of the form's closing. Raises Mismatch."""
        reader, ends = self._reader, (part.end, *closing)
        yield from reader.gap()
        if (yield from reader.sees(part.mark)):
            self._teller.begin(draft)
            values = _ElementValues(reader, self._teller.fragment, part, self._heads, self._doubts, closing, draft)
            yield from values.arguments(self._described(draft), ends)
            self._teller.end(draft)
        elif (yield from reader.sees("{")):
            self._teller.begin(draft)
            yield from transcribe_object(reader, JSON, self._teller.fragment)
            self._teller.end(draft)
            yield from reader.gap()
            if (yield from reader.one_of(ends)) is None:
                raise FormMismatch
            reader.record()
        else:
            raise FormMismatch

    def _described(self, draft: CallDraft) -> ValueSchema:
        tool = self._tools.get(draft.name)
        return ValueSchema.arguments(tool.parameters if tool is not None else {})


class _ElementValues:
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
        doubts: UnclosedValues,
        closing: tuple[str, ...],
        draft: CallDraft,
    ) -> None:
        self._reader, self._tell, self._part = reader, tell, part
        self._heads, self._doubts, self._closing = heads, doubts, closing
        self._draft = draft

    def arguments(self, described: ValueSchema, ends: tuple[str, ...]) -> Steps[None]:
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
            raise FormMismatch
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
        raise FormMismatch

    def _name(self) -> Steps[str]:
        found = yield from self._reader.until(make_markers(">"), LONGEST_ELEMENT_NAME)
        if found is None or not self._part.can_name(found[0]):
            raise FormMismatch
        return found[0]

    def _unopened(self) -> Steps[str]:
        """The name of an element without its opening tag, which the closing one tells: to that, it is put back."""
        reader, mark = self._reader, self._part.mark
        found = (
            (yield from reader.until(make_markers(mark), LONGEST_UNOPENED_ELEMENT))
            if self._part.open_optional
            else None
        )
        if found is None or not (yield from reader.literal("</")):
            raise FormMismatch
        name = yield from self._name()
        reader.unread(found[0] + self._part.closing(name))
        return name

    def _members(self, name: str | None, described: ValueSchema, ends: tuple[str, ...], depth: int) -> Steps[None]:
        """An object, whose first member's tag was passed."""
        self._tell("{")
        between = ""
        while name is not None:
            self._tell(f"{between}{json.dumps(name, ensure_ascii=False)}: ")
            yield from self._value(name, described.member(name), depth)
            name = yield from self._next(ends, depth)
            between = ", "
        self._tell("}")

    def _items(self, name: str | None, described: ValueSchema, ends: tuple[str, ...], depth: int) -> Steps[None]:
        """An array, whose first item's tag was passed. What the schema says is one has no members, by any name."""
        self._tell("[")
        index = 0
        while name is not None:
            self._tell(", " if index else "")
            yield from self._value(name, described.item(index), depth)
            name = yield from self._next(ends, depth)
            index += 1
        self._tell("]")

    def _value(self, name: str, described: ValueSchema, depth: int) -> Steps[None]:
        """What stands between an element's tags, and the closing one."""
        kinds, closing = described.kinds, self._part.closing(name)
        space = ""
        if kinds & CONTAINER_TYPES or "string" not in kinds:
            space = yield from self._reader.gap()
            if "string" not in kinds and (yield from self._reader.literal(closing)):
                self._tell(next((empty for kind, empty in _EMPTY_ELEMENTS if kind in kinds), '""'))
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

    def _nested(self, described: ValueSchema, closing: str, depth: int) -> Steps[None]:
        if depth > DEEPEST_ELEMENT:
            raise FormMismatch
        first = yield from self._next((closing,), depth)
        told = described.kinds & CONTAINER_TYPES
        is_array = "array" in told if len(told) == 1 else first == self._part.item
        yield from (self._items if is_array else self._members)(first, described, (closing,), depth)

    def _text(self, kinds: JsonTypes, closing: str, space: str, depth: int) -> Steps[None]:
        """A value that has no elements, and its closing tag: one that another tag follows."""
        reader, mark, within = self._reader, self._part.mark, self._within(closing)
        value = TextValue(kinds, "", self._tell)
        value.write(space)
        last: list[str] = []  # the text's end, which may be half a closing tag
        stray_closings = False  # the value holds markers that neither end it nor begin a call
        wanted = make_markers(closing, self._part.end, *self._closing, *self._heads.literals)

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
                stray_closings = True
            elif not (yield from self._forgotten(marker, within)):
                value.write(reader.advance(reader.at + 1))
                stray_closings = True
            elif value.may_be_text and (yield from self._goes_on(value, closing, within)):
                continue
            elif stray_closings or depth:
                self._break()
            else:
                value.close(forgotten=True)
                return
        raise FormMismatch

    def _forgotten(self, marker: str, within: ValueMarkers) -> Steps[bool]:
        if self._draft.strict:
            return False
        if marker in self._heads.literals:
            return (yield from within.head(self._reader)) > 0
        return (yield from within.ends_call(self._reader, marker))

    def _goes_on(self, value: TextValue, closing: str, within: ValueMarkers) -> Steps[bool]:
        closes = within.closes(self._reader, closing, lambda ahead: False)
        return (yield from self._doubts.goes_on(closes, value, within.all))
