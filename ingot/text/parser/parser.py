"""The one machine that reads a model's answer: pieces of text in, typed events out.

What it promises, for every format:

- The events do not depend on how the text was cut into pieces (`merged` gives their normal form), and the work is
  linear in the text.
- Thinking, text and calls come in the order in which they were written. A call inside a thinking part is thinking,
  unless the answer never leaves the part or says nothing else: then a complete call of a given tool is one where
  it can be nothing else (see `thinking.py`), and is told at the answer's end.
- A call is announced once, when it is certain. Its arguments follow as fragments of one JSON object. What does not
  parse as a call is delivered as the text it is; without tools everything is.
- A call that the answer's end cuts off before it was certain is text, or nothing where more would have come and its
  marker is there; after that, it ends with the arguments so far, and `ToolCallEnded` says that they are not complete.
- White space is delivered exactly, except next to a marker, where it only sets things apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal

from ingot.text.parse.call_ids import IdMaker
from ingot.text.parse.channels import ChannelReader
from ingot.text.parse.events import (
    ContentDelta,
    ParsedEvent,
    ReasoningDelta,
    ToolSchema,
    merged,
)
from ingot.text.parse.prose import Prose
from ingot.text.parser.calls import CallReader
from ingot.text.parser.events import Mismatch, Teller
from ingot.text.parser.prose import CallOpening, ThoughtReader
from ingot.text.parser.reader import Markers, Steps, TextReader, markers
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
        ids: IdMaker,
        must_call: bool = False,
    ) -> None:
        """`must_call`: the answer is held to be calls, so that none of it is text because it was cut."""
        self._must_call = must_call
        self._events: list[ParsedEvent] = []
        self._reader = TextReader()
        reasoning = Prose(lambda text: self._events.append(ReasoningDelta(text)))
        content = Prose(lambda text: self._events.append(ContentDelta(text)))
        named = {tool.name: tool for tool in tools}
        teller = Teller(self._reader, ids, self._events.append, content.restart)
        ends = () if format.channels is None else format.channels.ends
        self._calls = calls = CallReader(self._reader, named, teller, format.forms, ends)
        opened = thinking is ThinkingStart.OPENED
        self._answer: ChannelReader | _TaggedReader
        if format.channels is not None:
            self._answer = ChannelReader(format, self._reader, calls, reasoning, content, bool(tools))
        else:
            # A grammar holds strict tools to their schemas, but not within thinking.
            names = frozenset[str]() if any(tool.strict for tool in tools) else frozenset(named)

            def says_nothing() -> bool:
                return content.silent and not teller.begun

            thoughts = _thoughts(format, names, self._reader, calls, teller, reasoning, says_nothing)
            self._answer = _TaggedReader(
                format, self._reader, calls, thoughts, reasoning, content, can_call=bool(tools), must_call=must_call
            )
        self._machine = self._answer.answer(opened)
        next(self._machine, None)

    @property
    def thinking(self) -> bool:
        """Whether what was read last is thinking."""
        return self._answer.thinking

    @property
    def missing(self) -> str:
        """What is left to write of a call that was just told to have ended."""
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
        """The answer has ended, or was `cut`: all the rest."""
        if self._reader.ended:
            return []
        if cut and self._must_call:
            self._reader.drop_rest()
        self._reader.end(cut=cut)
        return self._resume()

    def _resume(self) -> list[ParsedEvent]:
        next(self._machine, None)
        events = merged(self._events)
        self._events.clear()
        return events


TriggerPlace = Literal["anywhere", "no JSON string", "fresh", "line", "unfenced line", "after a call", "after thinking"]


@dataclass(frozen=True, slots=True)
class Trigger:
    """What a marker sets off where it stands in the right place.

    `fresh`: nothing but white space stands between it and the last marker, or the answer's beginning. `line`: it begins
    one, or stands right behind a sentence. `after thinking`: the same, in an answer that has thought before.
    """

    marker: str
    place: TriggerPlace
    action: Literal["think", "strip", "open", "call"]
    forms: tuple[CallForm, ...] = ()


class _TaggedReader:
    """Answers in which markers set thinking and calls apart from the text."""

    def __init__(
        self,
        format: Format,
        reader: TextReader,
        calls: CallReader,
        thoughts: ThoughtReader | None,
        reasoning: Prose,
        content: Prose,
        *,
        can_call: bool,
        must_call: bool,
    ) -> None:
        self._format = format
        self._reader = reader
        self._calls = calls
        self._thoughts = thoughts
        self._reasoning = reasoning
        self._content = content
        self._can_call, self._must_call = can_call, must_call
        self._triggers, self._markers = triggers_of(format, can_call)
        self._called = False  # a call was the last thing but text
        self._thought = False
        self._broke = False  # and it broke off, so that another may begin within a line
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
                if self._in_place(trigger.place):
                    return trigger
            content.write(reader.advance(reader.at + 1))
        return None

    def _in_place(self, place: TriggerPlace) -> bool:
        match place:
            case "fresh":
                return self._content.blank
            case "line":
                return self._content.at_line_start or self._broke or self._content.attached
            case "no JSON string":
                return not self._content.in_json_string
            case "after thinking":
                begins = self._content.at_line_start or self._content.attached
                return self._thought and begins and not self._content.quotes
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
        assert self._thoughts is not None
        self.thinking = self._thought = True
        self._reasoning.restart()
        yield from reader.gap()
        while (yield from reader.literal(thinking.open)):  # some models repeat the tag that the prompt ended with
            yield from reader.gap()
        if (yield from self._thoughts.read()):
            self.thinking = False
            self._content.restart()

    def _section(self, forms: tuple[CallForm, ...], *, opened: bool, marker: str = "") -> Steps[None]:
        reader = self._reader
        reader.record()
        reader.advance(reader.at + len(marker))
        self._called, self._broke = True, False
        begun = self._calls.begun
        try:
            yield from self._calls.section(forms, opened=opened)
        except Mismatch:
            self._broke = self._calls.begun > begun
            if reader.cut and (self._must_call or not any(form.bare for form in forms)):
                reader.drop_rest()
        self._content.write(reader.recorded())

    def _opened_in_prompt(self) -> Steps[None]:
        """An answer may begin within a call whose marker the prompt ended with."""
        forms = tuple(form for form in self._format.forms if form.opening_in_prompt)
        if not (forms and self._can_call):
            return
        self._reader.record()
        try:
            yield from self._calls.section(forms, opened=False)
        except Mismatch:
            if self._reader.cut and self._must_call:
                self._reader.drop_rest()
        # Once, so it may be read again: it can hold a marker to strip.
        self._reader.unread(self._reader.recorded())


def _thoughts(
    format: Format,
    names: frozenset[str],
    reader: TextReader,
    calls: CallReader,
    teller: Teller,
    reasoning: Prose,
    says_nothing: Callable[[], bool],
) -> ThoughtReader | None:
    if (thinking := format.thinking) is None:
        return None
    return ThoughtReader(thinking.close, _openings(format), names, reader, calls, teller, reasoning, says_nothing)


@lru_cache(maxsize=64)
def _openings(format: Format) -> dict[str, CallOpening]:
    """The markers that may begin a call within thinking: those that cannot be taken for anything else."""
    found: dict[str, CallOpening] = {}
    for trigger in _call_triggers(format.forms):
        if trigger.forms and not any(form.bare for form in trigger.forms):
            found.setdefault(trigger.marker, CallOpening(trigger.forms, opened=trigger.action == "open"))
    return found


@lru_cache(maxsize=64)
def triggers_of(format: Format, can_call: bool) -> tuple[dict[str, list[Trigger]], Markers]:
    """What each marker sets off, and what finds them in arriving text."""
    triggers: dict[str, list[Trigger]] = {}
    for trigger in _triggers(format, can_call):
        triggers.setdefault(trigger.marker, []).append(trigger)
    return triggers, markers(*sorted(triggers))


def _triggers(format: Format, can_call: bool) -> list[Trigger]:
    found = [Trigger(text, "no JSON string", "strip") for text in format.strips]
    found += [Trigger(text, "fresh", "strip") for text in format.heads]
    if (thinking := format.thinking) is not None:
        # A closing tag where nothing was opened and nothing said closes a thinking part that was left out.
        found.append(Trigger(thinking.close, "fresh", "think"))
        found.append(Trigger(thinking.open, "line" if thinking.interleaved else "fresh", "think"))
        found.append(Trigger(thinking.open, "after thinking", "think"))
    return found + _call_triggers(format.forms) if can_call else found


def _call_triggers(forms: tuple[CallForm, ...]) -> list[Trigger]:
    by_marker: dict[tuple[str, TriggerPlace, Literal["open", "call"]], list[CallForm]] = {}
    closings: set[str] = set()
    for form in forms:
        place: TriggerPlace = "unfenced line" if form.bare else "anywhere"
        leading = form.leading(opened=False)
        if form.opening and isinstance(form.opening[0], str):
            by_marker.setdefault((form.opening[0], place, "open"), []).append(form)
        if (form.unopened != "never" or form.bare) and leading is not None:
            unopened: TriggerPlace = (
                "anywhere" if form.unopened == "anywhere" else "unfenced line" if form.bare else "line"
            )
            by_marker.setdefault((leading, unopened, "call"), []).append(form)
        if not form.bare:
            closings |= {part for part in form.closing if isinstance(part, str) and len(part) > 1}
            closings |= {part.end for part in form.call if isinstance(part, TextParameters | Elements)}
    found = [Trigger(marker, place, action, tuple(forms)) for (marker, place, action), forms in by_marker.items()]
    return found + [Trigger(closing, "after a call", "strip") for closing in sorted(closings)]
