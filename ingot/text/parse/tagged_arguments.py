"""Reads arguments that are written as text between tags, each turned into the type that its tool's schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ingot.text.formats.notation import JSON
from ingot.text.formats.table import KeyClose, TextParameters
from ingot.text.parse.call_events import Draft, Mismatch, Teller
from ingot.text.parse.events import ToolSchema
from ingot.text.parse.reader import Steps, TextReader, markers
from ingot.text.parse.schema_types import ANY, STRING, JsonTypes, parameter_kinds
from ingot.text.parse.text_values import TextValue
from ingot.text.parse.transcript import transcribed

LONGEST_KEY = 1024


@dataclass(frozen=True, slots=True)
class _Ends:
    """What may come behind a value: literals, and keys of the tool that were not given yet."""

    following: tuple[str, ...]
    missing: tuple[str, ...]


class TaggedArgumentReader:
    def __init__(self, reader: TextReader, tools: Mapping[str, ToolSchema], teller: Teller) -> None:
        self._reader = reader
        self._tools = tools
        self._teller = teller

    def read(self, part: TextParameters, draft: Draft, closing: tuple[str, ...]) -> Steps[None]:
        """All of a call's. `closing` are the literals of the form's closing. Raises Mismatch."""
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
        given: set[str] = set()
        while found == part.key_open:
            key, close = yield from self._key(part)
            if not given and (yield from self._wrapped(part, draft, key)):
                yield from self._object(draft)
                yield from self._ending((part.value_close,))
                yield from self._ending((part.end, *closing))
                return
            found = yield from self._valueless(part, following)
            if found is None:
                self._teller.fragment(f"{', ' if given else '{'}{json.dumps(key, ensure_ascii=False)}: ")
                given.add(key)
                ends = _Ends(following, tuple(self._properties(draft) - given) if part.close_optional else ())
                found = yield from self._value(part, self._kinds(draft, key, close), ends)
        self._teller.fragment("}" if given else "{}")
        self._teller.end(draft)

    def _object(self, draft: Draft) -> Steps[None]:
        yield from transcribed(self._reader, JSON, self._teller.fragment)
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

    def _key(self, part: TextParameters) -> Steps[tuple[str, KeyClose]]:
        self._reader.record(part.key_open)
        found = yield from self._reader.until(markers(*(close.text for close in part.key_closes)), LONGEST_KEY)
        if found is None:
            raise Mismatch
        key, text = found
        close = next(close for close in part.key_closes if close.text == text)
        stated = yield from self._stated_type(part)
        return key, close if stated is None else replace(close, kinds=stated)

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

    def _value(self, part: TextParameters, kinds: JsonTypes, ends: _Ends) -> Steps[str]:
        """One value, and the literal that follows its closing tag: only with one does the tag close it."""
        reader = self._reader
        value = TextValue(kinds, part.frame, self._teller.fragment)
        last: list[str] = []  # the text's end, which may be half a closing tag

        def write(text: str) -> None:
            if reader.ended:
                last.append(text)
            else:
                value.write(text)

        close = part.value_close
        if part.quote and (yield from reader.literal(part.quote[0])):
            close = part.quote[1] + close
        wanted = markers(close, *((part.key_open, part.end) if part.close_optional else ()))
        while (marker := (yield from reader.scan(wanted, write))) is not None:
            value.write("".join(last))
            last.clear()
            if marker != close:
                if not value.in_json_string and (yield from self._forgotten(part, marker, ends)):
                    value.close()
                    return reader.advance(reader.at + len(marker))
                value.write(reader.advance(reader.at + 1))
                continue
            reader.advance(reader.at + len(close))
            if value.in_json_string:
                value.write(close)
                continue
            space = yield from reader.gap()
            if (found := (yield from reader.one_of(ends.following))) is not None:
                value.close()
                return found
            if reader.cut_short(ends.following):
                value.close()
                raise Mismatch
            value.write(close + space)
        raise Mismatch

    def _forgotten(self, part: TextParameters, marker: str, ends: _Ends) -> Steps[bool]:
        """Whether a value ends at `marker` without its closing tag: before a parameter that the tool has and that was
        not given yet, or before the end of the call and of its form."""
        reader = self._reader
        if marker == part.end:
            for closing in ends.following:
                if closing not in (part.key_open, part.end) and (
                    yield from reader.sees_in_turn(((marker,), (closing,)))
                ):
                    return True
            return False
        heads = [f"{marker}{key}{close.text}" for key in ends.missing for close in part.key_closes]
        ahead = yield from reader.ahead(max(map(len, heads), default=0))
        return any(ahead.startswith(head) for head in heads)
