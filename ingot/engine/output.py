"""From a sequence's tokens to the events that its reader sees: text, thinking, calls, logprobs, and why it ended."""

from __future__ import annotations

from ingot.engine.answer_text import AnswerText
from ingot.engine.request import (
    AnswerEvent,
    Event,
    FinishReason,
    PromptScored,
    SequenceEnded,
    TextDelta,
    TokenInfo,
    TokenLogprob,
)
from ingot.engine.results import Logprobs, Result
from ingot.engine.sequence import Sequence
from ingot.text.tokenizer.detokenizer import StopMatcher
from ingot.text.tokenizer.tokenizer import Tokenizer


class Writer:
    """Turns results of one sequence into events. When `ended` is set, its `SequenceEnded` has been written."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._sequence, self._tokenizer = sequence, tokenizer
        self._text = _text(sequence, tokenizer)
        self._prompt: list[TokenInfo | None] = [None]
        self._awaits_prompt = sequence.sampling.prompt_logprobs is not None
        self._logprob_sum = 0.0
        self.thinking_tokens = 0
        self.ended: SequenceEnded | None = None

    @property
    def calls_in_thinking(self) -> int:
        return self._text.in_thinking

    def write(self, result: Result) -> list[Event]:
        """The events that follow from a result; the token in it is the sequence's newest."""
        events = self._score(result.prompt) if self._awaits_prompt else []
        if self._sequence.limit == 0:
            return events if self._awaits_prompt else events + self.finish("length")
        if result.token is not None:
            events += self._token(result.token, result.logprobs)
        return events

    def finish(self, reason: FinishReason, stopped_by: str | int | None = None) -> list[Event]:
        """Write out what is held back, and the end."""
        events = self._text.flush(cut=reason == "length")
        if self._text.stopped_by is not None:
            return self._end(events, "stop", self._text.stopped_by)
        return self._end(events, reason, stopped_by)

    def _score(self, scored: tuple[Logprobs, ...]) -> list[Event]:
        self._prompt += [self._info(logprobs, top=self._sequence.sampling.prompt_logprobs or 0) for logprobs in scored]
        if len(self._prompt) < len(self._sequence.prompt):
            return []
        self._awaits_prompt = False
        return [PromptScored(self._sequence.index, tuple(self._prompt))]

    def _token(self, token: int, logprobs: Logprobs | None) -> list[Event]:
        count = self._sequence.produced
        info = self._logprobs(logprobs)
        if token in self._sequence.stop_tokens and count > self._sequence.request.stop.min_tokens:
            return self.finish("stop", token)
        events = self._text.push(token, info)
        self.thinking_tokens += self._text.thinking
        if self._text.stopped_by is not None or self._text.done:
            return self._end(events, "stop", self._text.stopped_by)
        return [*events, *self.finish("length")] if count >= self._sequence.limit else list(events)

    def _logprobs(self, logprobs: Logprobs | None) -> TokenInfo | None:
        wanted = self._sequence.sampling.logprobs
        if wanted is None or logprobs is None:
            return None
        self._logprob_sum += logprobs.chosen[1]
        return self._info(logprobs, top=wanted)

    def _end(self, events: list[AnswerEvent], reason: FinishReason, stopped_by: str | int | None) -> list[Event]:
        if reason == "stop" and self._text.called and not isinstance(stopped_by, str):
            reason = "tool_calls"
        total = self._logprob_sum if self._sequence.sampling.logprobs is not None else None
        self.ended = SequenceEnded(
            self._sequence.index,
            reason,
            stopped_by,
            self._sequence.produced,
            total,
            self.thinking_tokens,
            tuple(self._sequence.generated),
            self._text.missing,
        )
        return [*events, self.ended]

    def _info(self, logprobs: Logprobs, top: int) -> TokenInfo:
        return TokenInfo(self._entry(*logprobs.chosen), tuple(self._entry(*pair) for pair in logprobs.top[:top]))

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TokenLogprob(token, raw.decode("utf-8", errors="replace"), raw, logprob)


class _PlainText:
    """Text as it stands, up to a stop string. A token's logprobs come with the text in which it begins."""

    called = done = thinking = False
    in_thinking = 0
    missing = ""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._index = sequence.index
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopMatcher(sequence.request.stop.strings, sequence.request.stop.keep)
        self._held: list[tuple[int, TokenInfo]] = []  # where its text begins, and the token
        self._decoded = self._released = 0  # characters
        self.stopped_by: str | None = None

    def push(self, token: int, info: TokenInfo | None) -> list[AnswerEvent]:
        if info is not None:
            self._held.append((self._decoded, info))
        return self._release(self._found(self._detokenizer.push(token)))

    def flush(self, *, cut: bool) -> list[AnswerEvent]:
        """Whether it was `cut` or not, it is text."""
        text = self._found(self._detokenizer.flush())
        if self.stopped_by is not None:
            return self._release(text)
        events = self._release(text + self._stops.flush())
        rest = tuple(info for _, info in self._held)
        return [*events, TextDelta(self._index, "", rest)] if rest else events

    def _found(self, text: str) -> str:
        self._decoded += len(text)
        found = self._stops.push(text)
        self.stopped_by = found.stopped_by
        return found.text

    def _release(self, text: str) -> list[AnswerEvent]:
        self._released += len(text)
        ready = [info for begins, info in self._held if begins < self._released]
        self._held = self._held[len(ready) :]
        return [TextDelta(self._index, text, tuple(ready))] if text or ready else []


class _ReadText:
    """Text that is read for thinking and calls. Tokens' logprobs come with the first event after them."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        reading = sequence.request.reading
        assert reading is not None
        self._index = sequence.index
        self._detokenizer = tokenizer.detokenizer(tokenizer.special_within(reading.format.markers))
        self._answer = AnswerText(sequence.index, reading, sequence.request.stop)
        self._held: list[TokenInfo] = []

    @property
    def called(self) -> bool:
        return self._answer.called

    @property
    def done(self) -> bool:
        return self._answer.done

    @property
    def missing(self) -> str:
        return self._answer.missing

    @property
    def in_thinking(self) -> int:
        return self._answer.in_thinking

    @property
    def thinking(self) -> bool:
        return self._answer.thinking

    @property
    def stopped_by(self) -> str | None:
        return self._answer.stopped_by

    def push(self, token: int, info: TokenInfo | None) -> list[AnswerEvent]:
        if info is not None:
            self._held.append(info)
        text = self._detokenizer.push(token)
        events = self._answer.push(text) if text else []
        return [*self._release(), *events] if events else []

    def flush(self, *, cut: bool) -> list[AnswerEvent]:
        rest = self._detokenizer.flush()
        events = self._answer.push(rest) if rest else []
        if self.stopped_by is None and not self.done:
            events += self._answer.flush(cut=cut)
        return [*self._release(), *events]

    def _release(self) -> list[AnswerEvent]:
        ready, self._held = tuple(self._held), []
        return [TextDelta(self._index, "", ready)] if ready else []


def _text(sequence: Sequence, tokenizer: Tokenizer) -> _PlainText | _ReadText:
    return (_PlainText if sequence.request.reading is None else _ReadText)(sequence, tokenizer)
