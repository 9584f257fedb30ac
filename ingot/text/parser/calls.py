"""Reads calls out of an answer, by the tables of `tool_formats`.

A call is held back until it is certain: until its name is complete and its arguments begin. From then on it streams and
cannot be retracted. Before, anything that does not fit raises `FormMismatch`, and what was read is in the reader's
record, to be emitted as text.

An answer that may have one call ends with its arguments; `unwritten_parts` is what is then left to write of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from ingot.text.parser.events import CallDraft, CallEventEmitter, FormMismatch, ToolSchema
from ingot.text.parser.reader import Steps, TextReader, make_markers
from ingot.text.parser.tagged_arguments import TaggedArgumentReader
from ingot.text.parser.unclosed_tags import call_heads
from ingot.text.parser.values import JsonTranscriber, feed_transcriber, transcribe_object
from ingot.text.tool_formats.format import (
    JSON,
    Arguments,
    CallForm,
    CallId,
    Elements,
    Gap,
    JsonCall,
    Maybe,
    Name,
    Notation,
    Ordinal,
    Part,
    TagEnd,
    TextParameters,
    UpTo,
    part_text,
)

LONGEST_FUNCTION_NAME = 256

_FUNCTION_NAME = re.compile(r"[^\s<>(){}\[\]\"'`,;=|]+")
_CALL_ID = re.compile(r"[A-Za-z0-9_\-]+")
_NUMBERED_NAME = re.compile(r"(?:functions\.)?(.+):[0-9]+")
_ARGUMENT_KEYS = ("arguments", "parameters")
_USUAL_KEYS = ("name", "tool_name", "type", "id", "tool_call_id", *_ARGUMENT_KEYS)


class CallReader:
    """Reports what it reads to the `emitter`."""

    def __init__(
        self,
        reader: TextReader,
        tools: Mapping[str, ToolSchema],
        emitter: CallEventEmitter,
        forms: tuple[CallForm, ...] = (),
        ends: tuple[str, ...] = (),
    ) -> None:
        """`ends` end a message that calls stand in."""
        self._reader = reader
        self._tools = tools
        self._emitter = emitter
        self._tagged = TaggedArgumentReader(reader, tools, emitter, call_heads(forms, ends))
        self._expected: tuple[Part, ...] = ()  # from where the record began, once a call's arguments are complete

    @property
    def call_count(self) -> int:
        """How many calls were announced."""
        return self._emitter.call_count

    @property
    def missing(self) -> str:
        """What is left to write of the last call and what closes it, once its arguments are complete."""
        return unwritten_parts(self._expected, self._reader.unsettled_text)

    def section(self, forms: tuple[CallForm, ...], *, opened: bool, only_known: bool = False) -> Steps[None]:
        """Calls in one of the forms. The reader records, and is after the forms' common marker if `opened`, else at the
        first call. Raises FormMismatch. Either way, what is in the record afterwards is text."""
        form = yield from self._chosen(forms, opened)
        for part in form.opening[1:] if opened else ():
            yield from self._plain(part)
        only_known = only_known or form.bare or not opened
        yield from self._call(form, only_known)
        while (yield from self._another(form)):
            yield from self._call(form, only_known)
        yield from self._closing(form)

    def named(self, name: str) -> Steps[None]:
        """The arguments, in JSON, of a call whose name is in a header. Raises FormMismatch."""
        draft = CallDraft(only_known=False, name=name)
        try:
            yield from self._arguments(JSON, draft)
        except FormMismatch:
            self._emitter.cut_off(draft)
            raise

    def _chosen(self, forms: tuple[CallForm, ...], opened: bool) -> Steps[CallForm]:
        """Forms may share a marker; what follows it distinguishes them, and one that begins with a name comes last."""
        if len(forms) == 1:
            return forms[0]
        yield from self._reader.gap()
        for form in sorted(forms, key=lambda form: len(form.leads(opened=opened)), reverse=True):
            if (yield from self._reader.next_in_turn(form.leads(opened=opened))):
                return form
        raise FormMismatch

    def _another(self, form: CallForm) -> Steps[bool]:
        """Whether one more call follows. Recording starts again here."""
        self._reader.record()
        self._expected = form.closing
        yield from self._reader.gap()
        if form.joint is None and not form.repeats:
            return False
        joint = (form.joint or "").strip()
        if joint and not (yield from self._reader.literal(joint)):
            return False
        yield from self._reader.gap()
        if (leading := form.leading(opened=False)) is not None:
            return (yield from self._reader.sees(leading))
        if form.repeats:
            return (yield from self._sees_name(form.name_markers))
        # A name comes first: where only white space sets calls apart, there is one unless the form is closed.
        closing = next((part for part in form.closing if isinstance(part, str)), None)
        if joint or closing is None:
            return True
        return not ((yield from self._reader.sees(closing)) or self._reader.cut_short((closing,)))

    def _sees_name(self, markers: tuple[str, ...]) -> Steps[bool]:
        """Whether a function's name and one of the markers come next."""
        self._reader.start_lookahead()
        name = yield from self._reader.run(_FUNCTION_NAME, LONGEST_FUNCTION_NAME)
        found = bool(name) and (yield from self._reader.next_in_turn((markers,)))
        self._reader.undo_lookahead()
        return found

    def _closing(self, form: CallForm) -> Steps[None]:
        reader = self._reader
        for index, part in enumerate(form.closing, start=1):
            if not isinstance(part, str):
                yield from self._plain(part)
            elif (yield from reader.literal(part)):
                reader.record()
                self._expected = form.closing[index:]
            else:
                if reader.cut_short((part,)):
                    reader.drop_remaining()
                return

    def _call(self, form: CallForm, only_known: bool) -> Steps[None]:
        draft = CallDraft(only_known, form.whole)
        tagged = False
        try:
            for index, part in enumerate(form.call, start=1):
                if not draft.ended:
                    within = ("}",) if isinstance(part, JsonCall) else ()
                    self._expected = (*within, *form.call[index:], *form.closing)
                if tagged and isinstance(part, str):
                    if (yield from self._reader.literal(part)):
                        continue
                    if self._reader.cut_short((part,)):
                        self._reader.drop_remaining()
                    break  # it was forgotten
                own, closing = _literal_parts(form.call[index:]), _literal_parts(form.closing)
                yield from self._part(part, draft, own, closing)
                tagged = tagged or isinstance(part, TextParameters | Elements)
                if isinstance(part, TagEnd) and draft.ended:
                    break
        except FormMismatch:
            self._emitter.cut_off(draft)
            raise
        self._emitter.settle()

    def _part(self, part: Part, draft: CallDraft, own: tuple[str, ...], closing: tuple[str, ...]) -> Steps[None]:
        """`own` are the literals that follow in its call, and `closing` those of the form's closing."""
        match part:
            case Name():
                yield from self._name(part, draft)
            case TagEnd():
                yield from self._tag_end(part, draft)
            case Ordinal():
                if (yield from self._reader.literal(part.before)):
                    yield from self._reader.run(_CALL_ID, LONGEST_FUNCTION_NAME)
                    yield from self._expect(part.after)
            case CallId():
                if (yield from self._reader.literal(part.marker)):
                    draft.id = (yield from self._reader.run(_CALL_ID, LONGEST_FUNCTION_NAME)) or None
            case Arguments():
                yield from self._arguments(part.notation, draft)
            case JsonCall():
                yield from self._json_call(part, draft)
            case TextParameters():
                yield from self._tagged.read_parameters(part, draft, own, closing)
            case Elements():
                yield from self._tagged.read_elements(part, draft, (*own, *closing))
            case _:
                yield from self._plain(part)

    def _plain(self, part: Part) -> Steps[None]:
        match part:
            case str():
                yield from self._expect(part)
            case Gap():
                yield from self._reader.gap()
            case Maybe():
                yield from self._reader.literal(part.text)
            case UpTo():
                if (yield from self._reader.until(make_markers(part.text), LONGEST_FUNCTION_NAME)) is None:
                    raise FormMismatch

    def _expect(self, literal: str) -> Steps[None]:
        if not (yield from self._reader.literal(literal)):
            raise FormMismatch

    # Names and ids.

    def _name(self, part: Name, draft: CallDraft) -> Steps[None]:
        name = yield from self._reader.run(_FUNCTION_NAME, LONGEST_FUNCTION_NAME)
        if part.numbered:
            numbered = _NUMBERED_NAME.fullmatch(name)
            name, draft.id = (numbered[1], name) if numbered else (name.removeprefix("functions."), None)
        self._take_name(name, draft)

    def _take_name(self, name: str, draft: CallDraft) -> None:
        if not 0 < len(name) <= LONGEST_FUNCTION_NAME or not name.isprintable():
            raise FormMismatch
        if draft.only_known and name not in self._tools:
            raise FormMismatch
        draft.name = name
        draft.strict = name in self._tools and self._tools[name].strict

    def _tag_end(self, part: TagEnd, draft: CallDraft) -> Steps[None]:
        if (yield from self._reader.literal(part.text)):
            return
        if part.instead and (yield from self._reader.sees(part.instead)):
            return
        if (yield from self._reader.one_of(part.alone)) is None:
            raise FormMismatch
        self._whole("{}", draft)

    # Arguments as one object.

    def _arguments(self, notation: Notation, draft: CallDraft) -> Steps[None]:
        for opens, _ in notation.brackets:
            if (yield from self._reader.sees(opens)):
                break
        else:
            raise FormMismatch
        self._emitter.begin(draft)
        yield from transcribe_object(self._reader, notation, self._emitter.fragment)
        self._emitter.end(draft)

    # A JSON object with the name and the arguments in it.

    def _json_call(self, part: JsonCall, draft: CallDraft) -> Steps[None]:
        reader = self._reader
        yield from self._expect("{")
        yield from reader.gap()
        another = not (yield from reader.sees("}"))
        while another:
            yield from self._member(part, draft)
            yield from reader.gap()
            another = yield from reader.literal(",")
            yield from reader.gap()
            another = another and not (yield from reader.sees("}"))
        if not draft.ended:
            # A call that has a name alone takes no arguments; but a bare object is none without them.
            if draft.only_known or not draft.name or not (yield from reader.sees("}")):
                raise FormMismatch
            self._whole("{}", draft)
        yield from self._expect("}")

    def _member(self, part: JsonCall, draft: CallDraft) -> Steps[None]:
        usual = (*_USUAL_KEYS, part.name_key, part.arguments_key)
        key = yield from self._json_key(usual if draft.only_known else None)
        if key == part.name_key and not draft.name:
            self._take_name((yield from self._json_string(self._tools if draft.only_known else None)), draft)
        elif key not in (*_ARGUMENT_KEYS, part.arguments_key) or draft.ended:
            yield from self._json_value()
        elif draft.name and (yield from self._reader.sees("{")):
            yield from self._arguments(JSON, draft)
        else:
            draft.early = _early_arguments((yield from self._json_value()))
        if draft.name and draft.early is not None and not draft.ended:
            self._whole(draft.early, draft)

    def _whole(self, arguments: str, draft: CallDraft) -> None:
        self._emitter.begin(draft)
        self._emitter.fragment(arguments)
        self._emitter.end(draft)

    def _json_key(self, only: Iterable[str] | None) -> Steps[str]:
        key = yield from self._json_string(only)
        yield from self._reader.gap()
        yield from self._expect(":")
        yield from self._reader.gap()
        return key

    def _json_string(self, only: Iterable[str] | None) -> Steps[str]:
        """Where it can be `only` some, any other is let go as soon as it differs from them."""
        if only is not None:
            found = yield from self._reader.one_of(tuple(json.dumps(each, ensure_ascii=False) for each in only))
            if found is None:
                raise FormMismatch
            return str(json.loads(found))
        if not (yield from self._reader.sees('"')):
            raise FormMismatch
        return str(json.loads((yield from self._json_value())))

    def _json_value(self) -> Steps[str]:
        transcriber = JsonTranscriber.of_value(JSON)
        while feed_transcriber(self._reader, transcriber):
            yield
        if transcriber.progress != "done":
            raise FormMismatch
        return transcriber.take()


def _early_arguments(value: str) -> str:
    """Arguments that came before the name, or as a JSON text within a string, or as null for none."""
    if value.startswith('"'):
        value = json.loads(value)
        reading = JsonTranscriber.of_arguments(JSON)
        text = value.strip()
        if reading.feed(text, 0) != len(text) or reading.progress != "done":
            raise FormMismatch
        return reading.take()
    if value == "null":
        return "{}"
    if not value.startswith("{"):
        raise FormMismatch
    return value


def _literal_parts(parts: tuple[Part, ...]) -> tuple[str, ...]:
    return tuple(part for part in parts if isinstance(part, str))


_SPACE = " \t\r\n"


def unwritten_parts(parts: Iterable[Part], written: str) -> str:
    """What is left of these parts, as we write them, after what is `written` of them, white space aside."""
    left = "".join(part_text(part) or "" for part in parts)
    for character in written:
        if character not in _SPACE:
            left = left.lstrip(_SPACE).removeprefix(character)
    return left.lstrip(_SPACE) if written[-1:] in tuple(_SPACE) else left
