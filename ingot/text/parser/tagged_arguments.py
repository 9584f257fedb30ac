"""Arguments between tags, each of the type that its tool's schema asks for.

Parameters are text between tags, one after another. Elements stand within elements: objects and arrays are tags too.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

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
from ingot.text.parser.reader import Markers, Steps, TextReader, make_markers
from ingot.text.parser.unclosed_tags import CallHeads, UnclosedValues, ValueMarkers
from ingot.text.parser.values import TextValue, transcribe_object
from ingot.text.tool_formats.format import JSON, Elements, KeyClose, TextParameters

LONGEST_KEY = 1024


class TaggedArgumentReader:
    """Reads all arguments of a call, and what ends them. Raises FormMismatch."""

    def __init__(
        self, reader: TextReader, tools: Mapping[str, ToolSchema], emitter: CallEventEmitter, heads: CallHeads
    ) -> None:
        self._reader = reader
        self._tools = tools
        self._emitter = emitter
        self._heads = heads
        self._unclosed = UnclosedValues(reader)

    def read_parameters(
        self, part: TextParameters, draft: CallDraft, own: tuple[str, ...], closing: tuple[str, ...]
    ) -> Steps[None]:
        """`own` are the literals that follow in the call, which are not passed, and `closing` those of the form's
        closing."""
        reader, closing, object_tags = self._reader, (*own, *closing), part.object_tags
        ends = (part.end, *closing)
        following = (part.key_open, *ends)
        yield from reader.gap()
        if part.close_optional and (yield from reader.literal(part.value_close)):  # of no value
            yield from reader.gap()
        tagged = object_tags is not None and (yield from reader.literal(object_tags[0]))
        if tagged:
            yield from reader.gap()
        if (yield from reader.sees("{")):
            yield from self._object(draft)
            if object_tags is not None and tagged:
                yield from self._pass_one_of((object_tags[1],))
            yield from self._pass_one_of(ends)
            return
        found = None if tagged else (yield from reader.one_of(following))
        if found is None:
            raise FormMismatch
        self._emitter.begin(draft)
        markers = ValueMarkers(self._heads, part.value_close, part.end, closing, part.key_open)
        read_keys: set[str] = set()
        while found == part.key_open:
            key, close = yield from self._key(part, markers, draft)
            if not read_keys and (yield from self._is_wrapper(part, draft, key)):
                yield from self._wrapped_object(draft, key, close)
                yield from self._pass_one_of((part.value_close,))
                yield from self._pass_one_of(ends)
                return
            found = yield from self._after_key(part, following)
            if found is None:
                self._emitter.fragment(f"{', ' if read_keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
                read_keys.add(key)
                value = TextValue(self._kinds(draft, key, close), part.frame, self._emitter.fragment)
                if close.text == part.frame:
                    value.write(part.frame)
                missing = self._missing_keys(part, draft, read_keys)
                found = yield from _ParameterReader(reader, self._unclosed, markers, value, draft, part, missing).read()
        self._emitter.fragment("}" if read_keys else "{}")
        self._emitter.end(draft)
        if found in (*own, *self._heads.ends):
            reader.unread(found)

    def read_elements(self, part: Elements, draft: CallDraft, closing: tuple[str, ...]) -> Steps[None]:
        """`closing` are the literals that follow in the call, and those of the form's closing."""
        reader, ends = self._reader, (part.end, *closing)
        yield from reader.gap()
        if (yield from reader.sees(part.mark)):
            self._emitter.begin(draft)
            elements = _ElementReader(reader, self._emitter.fragment, part, self._heads, self._unclosed, closing, draft)
            yield from elements.arguments(ValueSchema.arguments(self._parameters(draft)), ends)
            self._emitter.end(draft)
        elif (yield from reader.sees("{")):
            yield from self._object(draft)
            yield from self._pass_one_of(ends)
        else:
            raise FormMismatch

    def _object(self, draft: CallDraft) -> Steps[None]:
        self._emitter.begin(draft)
        yield from transcribe_object(self._reader, JSON, self._emitter.fragment)
        self._emitter.end(draft)

    def _wrapped_object(self, draft: CallDraft, key: str, close: KeyClose) -> Steps[None]:
        """An object under a name that is no parameter: all the arguments if the tool has such parameters, else the
        value that it seems to be."""
        read: list[str] = []
        try:
            yield from transcribe_object(self._reader, JSON, read.append)
        except FormMismatch:
            self._emitter.fragment("".join(read))
            raise
        text = "".join(read)
        unknown = json.loads(text).keys() - self._properties(draft)
        value = json.dumps(text, ensure_ascii=False) if close.value == "text" else text
        self._emitter.fragment(f"{{{json.dumps(key)}: {value}}}" if unknown else text)
        self._emitter.end(draft)

    def _pass_one_of(self, literals: tuple[str, ...]) -> Steps[None]:
        yield from self._reader.gap()
        if (yield from self._reader.one_of(literals)) is None:
            raise FormMismatch
        self._reader.record()

    def _is_wrapper(self, part: TextParameters, draft: CallDraft, key: str) -> Steps[bool]:
        """Whether the value of this key, which is none of the tool's, is all the arguments."""
        if key not in part.wrappers or draft.name not in self._tools or key in self._properties(draft):
            return False
        yield from self._reader.gap()
        return (yield from self._reader.sees("{"))

    def _parameters(self, draft: CallDraft) -> Mapping[str, Any]:
        tool = self._tools.get(draft.name)
        return {} if tool is None else tool.parameters

    def _properties(self, draft: CallDraft) -> frozenset[str]:
        listed = self._parameters(draft).get("properties")
        return frozenset(listed) if isinstance(listed, Mapping) else frozenset()

    def _missing_keys(self, part: TextParameters, draft: CallDraft, read_keys: set[str]) -> tuple[str, ...]:
        keys = self._properties(draft) - read_keys
        return tuple(f"{part.key_open}{part.write_key(key)}{close.text}" for key in keys for close in part.key_closes)

    def _key(self, part: TextParameters, markers: ValueMarkers, draft: CallDraft) -> Steps[tuple[str, KeyClose]]:
        """A key. At a marker of calls within it, what was to close it is missing, and the call breaks."""
        reader = self._reader
        reader.record(part.key_open)
        closes = {close.text: close for close in part.key_closes}
        reader.start_lookahead()
        found = yield from reader.until(markers.also(*closes), LONGEST_KEY)
        if found is not None and found[1] in closes:
            reader.keep_lookahead()
            key, close = part.read_key(found[0]), closes[found[1]]
            types = yield from self._type_tag(part)
            return key, close if types is None else replace(close, kinds=types)
        if found is not None:
            reader.undo_lookahead()
            reader.advance(reader.at + len(found[0]))
            draft.goes_on = True
        else:
            reader.keep_lookahead()
        raise FormMismatch

    def _type_tag(self, part: TextParameters) -> Steps[JsonTypes | None]:
        """The type before a value, if there is one that means anything: `array[string]` is an array."""
        if part.type_tags is None:
            return None
        yield from self._reader.gap()
        if not (yield from self._reader.literal(part.type_tags[0])):
            return None
        found = yield from self._reader.until(make_markers(part.type_tags[1]), LONGEST_KEY)
        if found is None:
            raise FormMismatch
        return JsonTypes(kind for kind in ANY_TYPE if kind == found[0].split("[")[0].strip().lower()) or None

    def _after_key(self, part: TextParameters, following: tuple[str, ...]) -> Steps[str | None]:
        """What follows a key that has no value; None where a value begins."""
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
        kinds = parameter_types(self._parameters(draft), key)
        return close.kinds if kinds == ANY_TYPE else kinds


@dataclass
class _ValueReader(ABC):
    """One value, up to its closing tag or to where that was forgotten.

    A forgotten tag is assumed before an end of the call that another end or the answer's confirms, and before another
    call: unless the value is a text that goes on after them, and that its own tags close later. Of a strict tool's call
    a grammar saw to the tags.
    """

    reader: TextReader
    unclosed: UnclosedValues
    markers: ValueMarkers
    value: TextValue
    draft: CallDraft

    def __post_init__(self) -> None:
        self._close = self.markers.value_close
        self._literals = self.markers.all
        self._tail: list[str] = []  # the text's end, which may be half a closing tag
        self._strays = False  # the value holds markers that neither end it nor begin a call

    def read(self) -> Steps[str]:
        """Passes the value and what ends it, and gives the literal that follows; nothing where another call comes.
        Raises FormMismatch."""
        while (marker := (yield from self.reader.scan(self._literals, self._write))) is not None:
            self.value.write("".join(self._tail))
            self._tail.clear()
            if self.value.in_json_string:
                found = yield from self._in_string(marker)
            elif marker == self._close:
                found = yield from self._closed()
            else:
                found = yield from self._at_marker(marker)
            if found is not None:
                return found
        raise FormMismatch

    def _write(self, text: str) -> None:
        if self.reader.ended:
            self._tail.append(text)
        else:
            self.value.write(text)

    def _in_string(self, marker: str) -> Steps[str | None]:
        """At a marker within a string of a value that is JSON: nothing there ends it."""
        yield from ()
        self.value.write(self.reader.advance(self.reader.at + 1))
        return None

    @abstractmethod
    def _closed(self) -> Steps[str | None]:
        """At the closing tag: what follows it if that closes the value, else None."""

    def _at_marker(self, marker: str) -> Steps[str | None]:
        forgotten = yield from self._forgotten(marker)
        if forgotten == "no":
            self._strays = True
            self.value.write(self.reader.advance(self.reader.at + 1))
            return None
        if forgotten == "perhaps" and (yield from self._goes_on()):
            return None
        self._end()
        return self._pass_marker(marker)

    def _forgotten(self, marker: str) -> Steps[Literal["no", "perhaps", "surely"]]:
        """Whether a closing tag was forgotten before the marker."""
        if self.draft.strict:
            return "no"
        if marker in self.markers.heads.literals:
            found = (yield from self.markers.head(self.reader)) > 0
        else:
            found = yield from self.markers.ends_call(self.reader, marker)
        return "no" if not found else "perhaps" if self.value.may_be_text else "surely"

    def _pass_marker(self, marker: str) -> str:
        return ""

    def _is_own_parameter(self, ahead: str) -> bool:
        return False

    def _goes_on(self, tag: str = "") -> Steps[bool]:
        """Whether the value is a text that holds what comes next. It is then written, with the tag before it."""
        closes = self.markers.closes(self.reader, self._close, self._is_own_parameter)
        return (yield from self.unclosed.goes_on(closes, self.value, self.markers.also(self._close), tag))

    def _end(self, tag: str = "") -> None:
        """The value ends here, behind its closing tag if there is one. With stray markers in it, it is not what was
        meant: the call is broken, and what follows is read by itself."""
        if self._strays:
            self.draft.goes_on = True
            self.reader.record(tag)
            raise FormMismatch
        self.value.close(forgotten=not tag)


@dataclass
class _ParameterReader(_ValueReader):
    """The value of a parameter.

    A closing tag closes it only where the next parameter, the end of the call or of its form follows. A forgotten one
    is also assumed before a parameter of the tool that is still `missing`. Within a string of a value that is JSON
    nothing ends it, unless the string is never closed.
    """

    part: TextParameters
    missing: tuple[str, ...]

    def read(self) -> Steps[str]:
        quote = self.part.quote
        if quote and (yield from self.reader.literal(quote[0])):
            self._close = quote[1] + self.part.value_close
            self._literals = self.markers.also(self._close)
        return (yield from super().read())

    def _in_string(self, marker: str) -> Steps[str | None]:
        doubtful = marker == self._close and not self.draft.strict
        if not doubtful or not (yield from self.markers.follows(self.reader, self._close)):
            return (yield from super()._in_string(marker))
        closes = self.markers.closes_json(self.reader, self._close, self.value.copy())
        if (yield from self.unclosed.goes_on(closes, self.value, self._literals)):
            return None
        return (yield from self._closed())

    def _closed(self) -> Steps[str | None]:
        reader, following = self.reader, self.markers.following
        reader.advance(reader.at + len(self._close))
        space = yield from reader.gap()
        found = yield from reader.one_of(following)
        if found is not None or reader.cut_short(following):
            self.value.close()
            if found is None:
                raise FormMismatch
            return found
        tag = self._close + space
        if not self.draft.strict and (yield from self.markers.head(reader)):
            if (yield from self._goes_on(tag)):
                return None
            self._end(tag)
            return ""
        self._strays = True
        self.value.write(tag)
        return None

    def _forgotten(self, marker: str) -> Steps[Literal["no", "perhaps", "surely"]]:
        reader, part = self.reader, self.part
        if marker == part.key_open:
            found = self._is_own_parameter((yield from reader.ahead(max(map(len, self.missing), default=0))))
            if not found or (self.draft.strict and not part.close_optional):
                return "no"
            return "surely" if part.close_optional or not self.value.may_be_text else "perhaps"
        if marker == part.end and part.close_optional and (yield from self.markers.ends_form(reader)):
            return "surely"
        if marker == part.value_close and marker not in self.markers.heads.literals:
            return "no"
        return (yield from super()._forgotten(marker))

    def _pass_marker(self, marker: str) -> str:
        if marker in self.markers.heads.literals:
            return ""
        return self.reader.advance(self.reader.at + len(marker))

    def _is_own_parameter(self, ahead: str) -> bool:
        return any(map(ahead.startswith, self.missing))


DEEPEST_ELEMENT = 64  # elements within one another
LONGEST_ELEMENT_NAME = 1024
LONGEST_UNOPENED_ELEMENT = 65536
"""Of a value whose opening tag was forgotten, which is held back until the closing tag names it."""

_EMPTY_ELEMENTS: tuple[tuple[JsonType, str], ...] = (("array", "[]"), ("object", "{}"), ("null", "null"))


@dataclass
class _ElementTextReader(_ValueReader):
    """The text of an element, whose closing tag is one that another tag follows. Within an object or array a forgotten
    tag breaks the call."""

    literals: Markers
    mark: str
    depth: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._literals, self._strays = self.literals, self.depth > 0

    def _closed(self) -> Steps[str | None]:
        reader = self.reader
        reader.advance(reader.at + len(self._close))
        space = yield from reader.gap()
        if (yield from reader.sees(self.mark)) or reader.cut_short((self.mark,)):
            self.value.close()
            return ""
        self._strays = True
        self.value.write(self._close + space)
        return None


@dataclass
class _ElementReader:
    """The elements of one call."""

    reader: TextReader
    emit: Callable[[str], None]
    part: Elements
    heads: CallHeads
    unclosed: UnclosedValues
    closing: tuple[str, ...]
    draft: CallDraft

    def arguments(self, schema: ValueSchema, ends: tuple[str, ...]) -> Steps[None]:
        yield from self._members((yield from self._next(ends, 0)), schema, ends, 0)

    def _next(self, ends: tuple[str, ...], depth: int) -> Steps[str | None]:
        """Passes the tag that opens another element, and gives its name: None where one of `ends` came instead, or
        another call, before which the arguments end."""
        reader = self.reader
        reader.record()
        yield from reader.gap()
        if (yield from reader.one_of(ends)) is not None:
            reader.forget()
            return None
        if not self.draft.strict and (yield from self._within(self.part.end).head(reader)):
            if depth:
                self._break()
            return None
        if not (yield from reader.literal(self.part.mark)):
            raise FormMismatch
        if (yield from reader.literal("<")):
            name = yield from self._name()
        else:
            name = yield from self._unopened()
        reader.forget()
        return name

    def _within(self, close: str) -> ValueMarkers:
        return ValueMarkers(self.heads, close, self.part.end, self.closing, self.part.mark)

    def _break(self) -> None:
        """What comes next is to be read by itself."""
        self.draft.goes_on = True
        self.reader.record()
        raise FormMismatch

    def _name(self) -> Steps[str]:
        found = yield from self.reader.until(make_markers(">"), LONGEST_ELEMENT_NAME)
        if found is None or not self.part.can_name(found[0]):
            raise FormMismatch
        return found[0]

    def _unopened(self) -> Steps[str]:
        """The name of an element without its opening tag, from the closing one; the text up to there is put back."""
        reader, mark = self.reader, self.part.mark
        found = (
            (yield from reader.until(make_markers(mark), LONGEST_UNOPENED_ELEMENT)) if self.part.open_optional else None
        )
        if found is None or not (yield from reader.literal("</")):
            raise FormMismatch
        name = yield from self._name()
        reader.unread(found[0] + self.part.closing(name))
        return name

    def _members(self, name: str | None, schema: ValueSchema, ends: tuple[str, ...], depth: int) -> Steps[None]:
        """An object, whose first member's tag was passed."""
        self.emit("{")
        between = ""
        while name is not None:
            self.emit(f"{between}{json.dumps(name, ensure_ascii=False)}: ")
            yield from self._value(name, schema.member(name), depth)
            name = yield from self._next(ends, depth)
            between = ", "
        self.emit("}")

    def _items(self, name: str | None, schema: ValueSchema, ends: tuple[str, ...], depth: int) -> Steps[None]:
        """An array, whose first item's tag was passed. By the schema it is one, so its elements may have any name."""
        self.emit("[")
        index = 0
        while name is not None:
            self.emit(", " if index else "")
            yield from self._value(name, schema.item(index), depth)
            name = yield from self._next(ends, depth)
            index += 1
        self.emit("]")

    def _value(self, name: str, schema: ValueSchema, depth: int) -> Steps[None]:
        """What stands between an element's tags, and the closing one."""
        kinds, closing = schema.kinds, self.part.closing(name)
        space = ""
        if kinds & CONTAINER_TYPES or "string" not in kinds:
            space = yield from self.reader.gap()
            if "string" not in kinds and (yield from self.reader.literal(closing)):
                self.emit(next((empty for kind, empty in _EMPTY_ELEMENTS if kind in kinds), '""'))
                return
            if (yield from self._nests(kinds)):
                yield from self._nested(schema, closing, depth + 1)
                return
        yield from self._text(kinds, closing, space, depth)

    def _nests(self, kinds: JsonTypes) -> Steps[bool]:
        """Whether an element comes next. A string may begin with a mark too."""
        mark = self.part.mark
        opens = f"{mark}<" if "string" in kinds else mark
        return (yield from self.reader.sees(opens)) and not (yield from self.reader.sees(f"{mark}</"))

    def _nested(self, schema: ValueSchema, closing: str, depth: int) -> Steps[None]:
        if depth > DEEPEST_ELEMENT:
            raise FormMismatch
        first = yield from self._next((closing,), depth)
        containers = schema.kinds & CONTAINER_TYPES
        is_array = "array" in containers if len(containers) == 1 else first == self.part.item
        yield from (self._items if is_array else self._members)(first, schema, (closing,), depth)

    def _text(self, kinds: JsonTypes, closing: str, space: str, depth: int) -> Steps[None]:
        """A value that has no elements, and its closing tag."""
        value = TextValue(kinds, "", self.emit)
        value.write(space)
        literals = make_markers(closing, self.part.end, *self.closing, *self.heads.literals)
        yield from _ElementTextReader(
            self.reader, self.unclosed, self._within(closing), value, self.draft, literals, self.part.mark, depth
        ).read()
