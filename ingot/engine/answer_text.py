"""An answer's text, read as its model family writes it: thinking, calls, and the content that stop strings watch."""

from __future__ import annotations

from ingot.engine.request import (
    AnswerEvent,
    AnswerParsing,
    CallArguments,
    CallBegan,
    CallEnded,
    Stop,
    TextDelta,
    ThinkingDelta,
)
from ingot.text.parse.call_ids import id_maker
from ingot.text.parse.events import (
    ContentDelta,
    ParsedEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegan,
    ToolCallEnded,
)
from ingot.text.parser.parser import Parser
from ingot.text.tokenizer.detokenizer import StopMatcher


class AnswerText:
    """One sequence's. Text goes in as it is decoded; after `stopped_by` or `done` is set, nothing follows.

    Stop strings are looked for in the content alone: neither thinking nor the arguments of a call end an answer.
    """

    def __init__(self, index: int, reading: AnswerParsing, stop: Stop) -> None:
        self._index, self._reading, self._stop = index, reading, stop
        ids = id_maker(reading.format.ids, past_calls=reading.past_calls)
        self._parser = Parser(
            reading.format, tools=reading.tools, thinking=reading.thinking, ids=ids, must_call=reading.must_call
        )
        self._stops = StopMatcher(stop.strings, stop.keep)
        self.called = False  # at least one call is complete
        self.in_thinking = 0  # calls that were read out of thinking
        self.done = False  # the one call that was allowed is complete
        self.stopped_by: str | None = None

    def push(self, text: str) -> list[AnswerEvent]:
        return self._told(self._parser.push(text))

    def flush(self, *, cut: bool) -> list[AnswerEvent]:
        """The text has ended, or was `cut`."""
        told = self._told(self._parser.flush(cut=cut))
        return told if self._over else [*told, *self._between()]

    @property
    def missing(self) -> str:
        """What is left to write of the call that the answer is done with."""
        return self._parser.missing if self.done else ""

    @property
    def thinking(self) -> bool:
        return self._parser.thinking

    @property
    def _over(self) -> bool:
        return self.done or self.stopped_by is not None

    def _told(self, parsed: list[ParsedEvent]) -> list[AnswerEvent]:
        told: list[AnswerEvent] = []
        for event in parsed:
            if self._over:
                break
            told += self._tell(event)
        return told

    def _tell(self, event: ParsedEvent) -> list[AnswerEvent]:
        index = self._index
        match event:
            case ContentDelta():
                return self._content(event.text)
            case ReasoningDelta():
                return [*self._between(), ThinkingDelta(index, event.text)]
            case ToolCallBegan():
                self.in_thinking += event.in_thinking
                return [*self._between(), CallBegan(index, event.index, event.id, event.name)]
            case ToolCallArguments():
                return [CallArguments(index, event.index, event.fragment)]
            case ToolCallEnded():
                self.called = self.called or event.complete
                self.done = self._reading.one_call and event.complete
                return [CallEnded(index, event.index, event.complete)]

    def _content(self, text: str) -> list[AnswerEvent]:
        found = self._stops.push(text)
        self.stopped_by = found.stopped_by
        return [TextDelta(self._index, found.text)] if found.text else []

    def _between(self) -> list[AnswerEvent]:
        """Something else follows the content: what was held back for a stop string is content after all."""
        rest = self._stops.flush()
        self._stops = StopMatcher(self._stop.strings, self._stop.keep)
        return [TextDelta(self._index, rest)] if rest else []
