"""Reads arguments that are written as text between tags, each turned into the type that its tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from ingot.text.formats.notation import JSON
from ingot.text.parse.events import ToolSchema
from ingot.text.parse.text_values import TextValue
from ingot.text.parse.transcript import transcribed
from ingot.text.parser.arguments import ANY, STRING, JsonTypes, parameter_kinds
from ingot.text.parser.events import Draft, Mismatch, Teller
from ingot.text.parser.reader import Steps, TextReader, markers
from ingot.text.parser.unclosed_tags import CallHeads, Doubts, ValueMarkers
from ingot.text.tool_formats.format import KeyClose, TextParameters

LONGEST_KEY = 1024


class TaggedArgumentReader:
    def __init__(self, reader: TextReader, tools: Mapping[str, ToolSchema], teller: Teller, heads: CallHeads) -> None:
        self._reader = reader
        self._tools = tools
        self._teller = teller
        self._heads = heads
        self._doubts = Doubts(reader)

    def read(self, part: TextParameters, draft: Draft, own: tuple[str, ...], closing: tuple[str, ...]) -> Steps[None]:
        """All of a call's. `own` are the literals that follow in the call, which are not passed, and `closing` those of
        the form's closing. Raises Mismatch."""
        closing = (*own, *closing)
        following = (part.key_open, part.end, *closing)
        yield from self._reader.gap()
        if part.object_tags and (yield from self._reader.literal(part.object_tags[0])):
            yield from self._reader.gap()
            if not (yield from self._reader.sees("{")):
                raise Mismatch
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
            raise Mismatch
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
                found = yield from _ValueReader(self._reader, self._doubts, part, within, missing, value, draft).read()
        self._teller.fragment("}" if given else "{}")
        self._teller.end(draft)
        if found in (*own, *self._heads.ends):
            self._reader.unread(found)

    def _object(self, draft: Draft) -> Steps[None]:
        yield from transcribed(self._reader, JSON, self._teller.fragment)
        self._teller.end(draft)

    def _wrapped_object(self, draft: Draft, key: str, close: KeyClose) -> Steps[None]:
        """An object under a name that is no parameter: all the arguments if the tool has such parameters, else the
        value that it seems to be."""
        read: list[str] = []
        try:
            yield from transcribed(self._reader, JSON, read.append)
        except Mismatch:
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
            raise Mismatch
        self._reader.record()

    def _wrapped(self, part: TextParameters, draft: Draft, key: str) -> Steps[bool]:
        """Whether the value of this key, which is none of the tool's, is all the arguments."""
        if key not in part.wrappers or draft.name not in self._tools or key in self._properties(draft):
            return False
        yield from self._reader.gap()
        return (yield from self._reader.sees("{"))

    def _properties(self, draft: Draft) -> frozenset[str]:
        tool = self._tools.get(draft.name)
        listed = tool.parameters.get("properties") if tool is not None else None
        return frozenset(listed) if isinstance(listed, Mapping) else frozenset()

    def _missing(self, part: TextParameters, draft: Draft, given: set[str]) -> tuple[str, ...]:
        keys = self._properties(draft) - given
        return tuple(f"{part.key_open}{key}{close.text}" for key in keys for close in part.key_closes)

    def _key(self, part: TextParameters, within: ValueMarkers, draft: Draft) -> Steps[tuple[str, KeyClose]]:
        """A key. At a marker of calls within it, what was to close it is missing, and the call breaks."""
        reader = self._reader
        reader.record(part.key_open)
        closes = {close.text: close for close in part.key_closes}
        reader.look_ahead()
        found = yield from reader.until(within.also(*closes), LONGEST_KEY)
        if found is not None and found[1] in closes:
            reader.go_there()
            key, close = found[0], closes[found[1]]
            stated = yield from self._stated_type(part)
            return key, close if stated is None else replace(close, kinds=stated)
        if found is not None:
            reader.look_back()
            reader.advance(reader.at + len(found[0]))
            draft.goes_on = True
        else:
            reader.go_there()
        raise Mismatch

    def _stated_type(self, part: TextParameters) -> Steps[JsonTypes | None]:
        """The type that stands before a value, if one does and means anything: `array[string]` is an array."""
        if part.type_tags is None:
            return None
        yield from self._reader.gap()
        if not (yield from self._reader.literal(part.type_tags[0])):
            return None
        found = yield from self._reader.until(markers(part.type_tags[1]), LONGEST_KEY)
        if found is None:
            raise Mismatch
        return JsonTypes(kind for kind in ANY if kind == found[0].split("[")[0].strip().lower()) or None

    def _valueless(self, part: TextParameters, following: tuple[str, ...]) -> Steps[str | None]:
        """What follows a key that has no value; None where one has begun."""
        found: str | None = None
        if part.value_open:
            yield from self._reader.gap()
            if not (yield from self._reader.literal(part.value_open)):
                found = yield from self._reader.one_of(following)
                if found is None:
                    raise Mismatch
        self._reader.forget()
        return found

    def _kinds(self, draft: Draft, key: str, close: KeyClose) -> JsonTypes:
        if close.value == "text":
            return STRING
        if close.value == "json":
            return close.kinds - STRING
        tool = self._tools.get(draft.name)
        kinds = parameter_kinds(tool.parameters, key) if tool is not None else ANY
        return close.kinds if kinds == ANY else kinds


class _ValueReader:
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
        doubts: Doubts,
        part: TextParameters,
        within: ValueMarkers,
        missing: tuple[str, ...],
        value: TextValue,
        draft: Draft,
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
        raise Mismatch

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
                raise Mismatch
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
            raise Mismatch
        self._value.close(forgotten=not tag)
