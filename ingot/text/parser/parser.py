"""The parser of a model's answer: pieces of text in, typed events out.

What it guarantees, for every format:

- The events do not depend on how the text was cut into pieces (`merge_events` gives their normal form), and the work is
  linear in the text.
- Thinking, text and calls come in the order in which they were written. A call within thinking is thinking, unless the
  answer never leaves it or has nothing else: then a complete call of one of the tools is a call where it can be nothing
  else (see `prose.ThinkingReader`), and is announced at the answer's end.
- A call is announced once, when it is certain. Its arguments follow as fragments of one JSON object. What does not
  parse as a call is delivered as text; without tools everything is.
- A call that is cut off before it was certain is text, or dropped where the limit cut it and its marker is there; after
  that, it ends with the arguments so far, and `ToolCallEnded` marks them as incomplete.
- White space is delivered exactly, except next to a marker, where it is only a separator.

Answers are of two kinds: text in which markers separate thinking and calls, and messages with headers that state the
kind of their body (`ChannelAnswerReader`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal

from ingot.text.parser.calls import CallReader
from ingot.text.parser.events import (
    CallEventEmitter,
    CallIdMaker,
    ContentDelta,
    FormMismatch,
    ParsedEvent,
    ReasoningDelta,
    ToolSchema,
    merge_events,
)
from ingot.text.parser.prose import CallOpening, ProseWriter, ThinkingReader
from ingot.text.parser.reader import Markers, Steps, TextReader, make_markers
from ingot.text.tool_formats.format import CallForm, Elements, Format, TextParameters, ThinkingFormat


class ThinkingStart(Enum):
    """Where the answer begins."""

    OPENED = "opened"  # within a thinking part: the prompt ended with its opening tag
    UNOPENED = "unopened"  # outside; the model may open one

    @classmethod
    def after(cls, prompt: str, thinking: ThinkingFormat | None) -> ThinkingStart:
        """As a rendered prompt leaves it."""
        end = prompt.rstrip()
        opened = thinking is not None and (
            end.endswith(thinking.open) or (thinking.implied and not end.endswith(thinking.close))
        )
        return cls.OPENED if opened else cls.UNOPENED


class Parser:
    """One answer's. Belongs to one thread at a time; ends with `flush`."""

    def __init__(
        self,
        format: Format,
        *,
        tools: Sequence[ToolSchema],
        thinking: ThinkingStart,
        ids: CallIdMaker,
        must_call: bool = False,
    ) -> None:
        """`must_call`: the answer can only be calls, so that none of it is text because it was cut."""
        self._must_call = must_call
        self._events: list[ParsedEvent] = []
        self._reader = TextReader()
        reasoning = ProseWriter(lambda text: self._events.append(ReasoningDelta(text)))
        content = ProseWriter(lambda text: self._events.append(ContentDelta(text)))
        named = {tool.name: tool for tool in tools}
        emitter = CallEventEmitter(self._reader, ids, self._events.append, content.restart)
        ends = () if format.channels is None else format.channels.ends
        self._calls = calls = CallReader(self._reader, named, emitter, format.forms, ends)
        opened = thinking is ThinkingStart.OPENED
        self._answer: ChannelAnswerReader | _TaggedAnswerReader
        if format.channels is not None:
            self._answer = ChannelAnswerReader(format, self._reader, calls, reasoning, content, bool(tools))
        else:
            # A grammar constrains calls of strict tools, but not within thinking.
            names = frozenset[str]() if any(tool.strict for tool in tools) else frozenset(named)

            def is_silent() -> bool:
                return content.silent and not emitter.call_count

            openings = _call_openings(format) if names else {}
            thinking_reader = None
            if format.thinking is not None:
                thinking_reader = ThinkingReader(
                    format.thinking.close, openings, names, self._reader, calls, emitter, reasoning, is_silent
                )
            self._answer = _TaggedAnswerReader(
                format, self._reader, calls, thinking_reader, reasoning, content, bool(tools), must_call
            )
        self._machine = self._answer.answer(opened)
        next(self._machine, None)

    @property
    def thinking(self) -> bool:
        """Whether what was read last is thinking."""
        return self._answer.thinking

    @property
    def missing(self) -> str:
        """What is left to write of a call that has just ended."""
        return self._calls.missing

    def push(self, text: str) -> list[ParsedEvent]:
        """What is certain now."""
        if self._reader.ended:
            raise ValueError("the answer has ended")
        if not text:
            return []
        self._reader.feed(text)
        return self._resume()

    def flush(self, *, cut: bool = False) -> list[ParsedEvent]:
        """The answer has ended, or was `cut`: all remaining events."""
        if self._reader.ended:
            return []
        if cut and self._must_call:
            self._reader.drop_remaining()
        self._reader.end(cut=cut)
        return self._resume()

    def _resume(self) -> list[ParsedEvent]:
        next(self._machine, None)
        events = merge_events(self._events)
        self._events.clear()
        return events


TriggerPosition = Literal[
    "anywhere", "no JSON string", "fresh", "line", "unfenced line", "after a call", "after thinking"
]


@dataclass(frozen=True, slots=True)
class Trigger:
    """What a marker triggers at the right position.

    `fresh`: only white space stands between it and the last marker, or the answer's beginning. `line`: it begins a
    line, or directly follows a sentence. `after thinking`: the same, in an answer that has thought before.
    """

    marker: str
    position: TriggerPosition
    action: Literal["think", "strip", "open", "call"]
    forms: tuple[CallForm, ...] = ()


class _TaggedAnswerReader:
    """Answers in which markers set thinking and calls apart from the text."""

    def __init__(
        self,
        format: Format,
        reader: TextReader,
        calls: CallReader,
        thinking_reader: ThinkingReader | None,
        reasoning: ProseWriter,
        content: ProseWriter,
        can_call: bool,
        must_call: bool,
    ) -> None:
        self._format = format
        self._reader = reader
        self._calls = calls
        self._thinking_reader = thinking_reader
        self._reasoning = reasoning
        self._content = content
        self._can_call, self._must_call = can_call, must_call
        self._triggers, self._markers = triggers_of(format, can_call)
        self._called = False  # a call was the last thing but text
        self._has_thought = False
        self._call_broke_off = False  # and it broke off, so that another may begin within a line
        self.thinking = False

    def answer(self, opened: bool) -> Steps[None]:
        if opened and self._format.thinking is not None:
            yield from self._think(self._format.thinking)
        yield from self._opened_in_prompt()
        while (trigger := (yield from self._next())) is not None:
            yield from self._act(trigger)
        self._content.finish()

    def _next(self) -> Steps[Trigger | None]:
        """Delivers text up to the next marker that means something where it stands."""
        reader, content = self._reader, self._content
        while (marker := (yield from reader.scan(self._markers, content.write))) is not None:
            for trigger in self._triggers[marker]:
                if self._is_at(trigger.position):
                    return trigger
            content.write(reader.advance(reader.at + 1))
        return None

    def _is_at(self, position: TriggerPosition) -> bool:
        match position:
            case "fresh":
                return self._content.blank
            case "line":
                return self._content.at_line_start or self._call_broke_off or self._content.attached
            case "no JSON string":
                return not self._content.in_json_string
            case "after thinking":
                begins = self._content.at_line_start or self._content.attached
                return self._has_thought and begins and not self._content.quotes
            case "unfenced line":
                return self._content.at_line_start and not self._content.fenced
            case "after a call":
                return self._content.blank and self._called
        return True

    def _act(self, trigger: Trigger) -> Steps[None]:
        reader = self._reader
        if trigger.action == "call":
            yield from self._section(trigger.forms, opened=False)
            return
        if trigger.action == "open":
            yield from self._section(trigger.forms, opened=True, marker=trigger.marker)
            return
        reader.advance(reader.at + len(trigger.marker))
        if trigger.action == "think" and self._format.thinking is not None:
            self._content.restart()
            self._called = False
            if trigger.marker == self._format.thinking.open:
                yield from self._think(self._format.thinking)

    def _think(self, thinking: ThinkingFormat) -> Steps[None]:
        """Up to the closing tag, or the end: an answer that never closes its thinking has no content."""
        reader = self._reader
        assert self._thinking_reader is not None
        self.thinking = self._has_thought = True
        self._reasoning.restart()
        yield from reader.gap()
        while (yield from reader.literal(thinking.open)):  # some models repeat the tag that the prompt ended with
            yield from reader.gap()
        if (yield from self._thinking_reader.read()):
            self.thinking = False
            self._content.restart()

    def _section(self, forms: tuple[CallForm, ...], *, opened: bool, marker: str = "") -> Steps[None]:
        reader = self._reader
        reader.record()
        reader.advance(reader.at + len(marker))
        self._called, self._call_broke_off = True, False
        call_count = self._calls.call_count
        try:
            yield from self._calls.section(forms, opened=opened)
        except FormMismatch:
            self._call_broke_off = self._calls.call_count > call_count
            if reader.cut and (self._must_call or not any(form.bare for form in forms)):
                reader.drop_remaining()
        self._content.write(reader.recorded())

    def _opened_in_prompt(self) -> Steps[None]:
        """An answer may begin within a call whose marker the prompt ended with."""
        forms = tuple(form for form in self._format.forms if form.opening_in_prompt)
        if not (forms and self._can_call):
            return
        self._reader.record()
        try:
            yield from self._calls.section(forms, opened=False)
        except FormMismatch:
            if self._reader.cut and self._must_call:
                self._reader.drop_remaining()
        # Once, so it may be read again: it can hold a marker to strip.
        self._reader.unread(self._reader.recorded())


@lru_cache(maxsize=64)
def _call_openings(format: Format) -> dict[str, CallOpening]:
    """The markers that may begin a call within thinking: those that cannot be mistaken for anything else."""
    found: dict[str, CallOpening] = {}
    for trigger in _call_triggers(format.forms):
        if trigger.forms and not any(form.bare for form in trigger.forms):
            found.setdefault(trigger.marker, CallOpening(trigger.forms, opened=trigger.action == "open"))
    return found


@lru_cache(maxsize=64)
def triggers_of(format: Format, can_call: bool) -> tuple[dict[str, list[Trigger]], Markers]:
    """What each marker sets off, and what finds them in arriving text."""
    triggers: dict[str, list[Trigger]] = {}
    for trigger in _format_triggers(format, can_call):
        triggers.setdefault(trigger.marker, []).append(trigger)
    return triggers, make_markers(*sorted(triggers))


def _format_triggers(format: Format, can_call: bool) -> list[Trigger]:
    found = [Trigger(text, "no JSON string", "strip") for text in format.strips]
    found += [Trigger(text, "fresh", "strip") for text in format.heads]
    if (thinking := format.thinking) is not None:
        # A closing tag where nothing was opened or written closes a thinking part that was left out.
        found.append(Trigger(thinking.close, "fresh", "think"))
        found.append(Trigger(thinking.open, "line" if thinking.interleaved else "fresh", "think"))
        found.append(Trigger(thinking.open, "after thinking", "think"))
    return found + _call_triggers(format.forms) if can_call else found


def _call_triggers(forms: tuple[CallForm, ...]) -> list[Trigger]:
    by_marker: dict[tuple[str, TriggerPosition, Literal["open", "call"]], list[CallForm]] = {}
    closings: set[str] = set()
    for form in forms:
        position: TriggerPosition = "unfenced line" if form.bare else "anywhere"
        leading = form.leading(opened=False)
        if form.opening and isinstance(form.opening[0], str):
            by_marker.setdefault((form.opening[0], position, "open"), []).append(form)
        if (form.unopened != "never" or form.bare) and leading is not None:
            unopened: TriggerPosition = (
                "anywhere" if form.unopened == "anywhere" else "unfenced line" if form.bare else "line"
            )
            by_marker.setdefault((leading, unopened, "call"), []).append(form)
        if not form.bare:
            closings |= {part for part in form.closing if isinstance(part, str) and len(part) > 1}
            closings |= {part.end for part in form.call if isinstance(part, TextParameters | Elements)}
    found = [Trigger(marker, position, action, tuple(forms)) for (marker, position, action), forms in by_marker.items()]
    return found + [Trigger(closing, "after a call", "strip") for closing in sorted(closings)]


LONGEST_HEADER = 1024
LONGEST_RECIPIENT = 256

_RECIPIENT_NAME = re.compile(r"[^\s<]+")


class ChannelAnswerReader:
    """Text outside of any message, as after a prompt that began one, is the answer's. Calls may stand there too."""

    def __init__(
        self,
        format: Format,
        reader: TextReader,
        calls: CallReader,
        reasoning: ProseWriter,
        content: ProseWriter,
        can_call: bool,
    ) -> None:
        assert format.channels is not None
        self._channels = channels = format.channels
        self._forms = format.forms
        self._reader = reader
        self._calls = calls
        self._reasoning = reasoning
        self._content = content
        self._next_recipient = (f" {channels.recipient}",) if channels.unended else ()
        breaks = (channels.start, *channels.begins, *channels.ends, *self._next_recipient)
        self._within = make_markers(*breaks)
        openings = [form.opening[0] for form in format.forms if form.opening and can_call]
        self._openings = frozenset(opening for opening in openings if isinstance(opening, str))
        ends = [part.end for form in format.forms for part in form.call if isinstance(part, TextParameters | Elements)]
        closings = [part for form in format.forms for part in form.closing if isinstance(part, str)]
        self._closings = (*ends, *closings)  # what means nothing behind a call
        self._outside = self._active_markers = make_markers(*breaks, *self._openings)
        self._bodies = make_markers(*channels.bodies)
        kinds = [(re.compile(pattern), kind) for pattern, kind in channels.kinds]
        self._kinds = [each for each in kinds if can_call or each[1] not in ("call", "calls")]
        self._prose = content

    @property
    def thinking(self) -> bool:
        return self._prose is self._reasoning

    def answer(self, opened: bool) -> Steps[None]:
        if opened:
            self._reasoning.restart()
            self._prose, self._active_markers = self._reasoning, self._within
        elif (yield from self._within_header()):
            self._prose = yield from self._header()
        while (marker := (yield from self._reader.scan(self._active_markers, self._prose.write))) is not None:
            if marker in self._channels.ends:
                self._reader.advance(self._reader.at + len(marker))
                self._prose, self._active_markers = self._between(self._content), self._outside
            elif marker in self._openings:
                self._prose = yield from self._calls_in_forms()
            elif marker not in self._next_recipient or (yield from self._names_recipient(marker)):
                self._prose = yield from self._header()
        self._prose.finish()

    def _within_header(self) -> Steps[bool]:
        """Whether the answer goes on with the header that the prompt ended in: before any marker, a recipient may
        come, or a name, or nothing."""
        reader, recipient = self._reader, self._channels.recipient
        if (yield from reader.next_in_turn((self._channels.bodies,))):
            return True
        if recipient:
            if (yield from reader.sees(" " + recipient)):
                return True
            return (yield from reader.sees(recipient))
        return (yield from self._names_recipient(""))

    def _names_recipient(self, before: str) -> Steps[bool]:
        """Whether a name and the marker of a body come next, behind `before`; if not, that and the name are text."""
        reader = self._reader
        reader.record()
        reader.advance(reader.at + len(before))
        yield from reader.run(_RECIPIENT_NAME, LONGEST_RECIPIENT)
        for body in self._channels.bodies:
            if (yield from reader.sees(body)):
                reader.unread(reader.recorded())
                return True
        self._prose.write(reader.recorded())
        return False

    def _header(self) -> Steps[ProseWriter]:
        """Reads a header, and the body too if it is a call's; what the text that follows is."""
        reader = self._reader
        reader.record()
        found = yield from reader.until(self._bodies, LONGEST_HEADER)
        if found is None:
            if reader.cut:  # within the header
                reader.drop_remaining()
            self._content.write(reader.recorded())
            return self._content
        reader.forget()
        self._active_markers = self._within
        header = "".join(found)
        for pattern, kind in self._kinds:
            if (match := pattern.search(header)) is None:
                continue
            if kind == "call":
                return (yield from self._call(match[1]))
            if kind == "calls":
                self._between(self._content)
                return (yield from self._calls_in_forms())
            return self._between(self._reasoning if kind == "thinking" else self._content)
        return self._between(self._content)

    def _call(self, name: str) -> Steps[ProseWriter]:
        self._between(self._content)
        self._reader.record()
        with suppress(FormMismatch):
            yield from self._reader.gap()
            yield from self._calls.named(name)
        self._content.write(self._reader.recorded())
        return self._content

    def _calls_in_forms(self) -> Steps[ProseWriter]:
        reader = self._reader
        self._reasoning.restart()
        goes_on = True
        stray_closings: tuple[str, ...] = ()
        while goes_on:
            reader.record()
            yield from reader.gap()
            if (yield from reader.one_of(stray_closings)) is not None:
                reader.forget()
                continue
            call_count, stray_closings = self._calls.call_count, self._closings
            try:
                goes_on = yield from self._section()
            except FormMismatch:
                goes_on = self._calls.call_count > call_count and not reader.cut  # behind a broken call others may come
                if reader.cut:
                    reader.drop_remaining()
            self._content.write(reader.recorded())
        return self._content

    def _section(self) -> Steps[bool]:
        """Calls in the first form that begins here, if one does. Raises Mismatch."""
        for form in self._forms:
            if (yield from self._opens(form)):
                yield from self._calls.section((form,), opened=True)
                return True
            leading = form.leading(opened=False)
            if form.unopened != "never" and leading is not None and (yield from self._reader.sees(leading)):
                yield from self._calls.section((form,), opened=False)
                return True
        return False

    def _opens(self, form: CallForm) -> Steps[bool]:
        """Passes what opens the form, where there is anything."""
        marker = next((part for part in form.opening if isinstance(part, str)), None)
        if marker is not None:
            return (yield from self._reader.literal(marker))
        return (yield from self._reader.sees(form.leading(opened=False) or ""))

    def _between(self, prose: ProseWriter) -> ProseWriter:
        self._reasoning.restart()
        self._content.restart()
        return prose
