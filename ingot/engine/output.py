"""Output: from a sequence's tokens to the events that a request's reader gets.

`SequenceOutput` detokenizes, watches for stop strings, reads thinking and tool calls out of the text where the
model's family writes them, and says why an answer ended. `ActiveRequest` is a request while it runs: its
sequences, their output, and what its reader may ask about it. `Outbox` hands out a step's events, so that each
reader is woken once a step. The engine thread's alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress

from ingot.engine.forward_pass import Logprobs, SequenceResult
from ingot.engine.request import (
    AnswerEvent,
    AnswerParsing,
    CacheReason,
    CacheReport,
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    FinishReason,
    Phase,
    PromptScored,
    Request,
    RequestStatus,
    SequenceEnded,
    SpecPrefillReport,
    SpeculationReport,
    Stop,
    TextDelta,
    ThinkingDelta,
    Timing,
    TokenInfo,
    TokenLogprob,
    Usage,
)
from ingot.engine.sequence import TokenSequence
from ingot.engine.streams import EventSink
from ingot.observe.logs import log_facts
from ingot.text.parser.events import (
    ContentDelta,
    ParsedEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegan,
    ToolCallEnded,
    call_id_maker,
)
from ingot.text.parser.parser import Parser
from ingot.text.tokenizer.detokenizer import StopMatcher
from ingot.text.tokenizer.tokenizer import Tokenizer


class SequenceOutput:
    """Turns results of one sequence into events. When `ended` is set, its `SequenceEnded` has been written."""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer) -> None:
        self._sequence, self._tokenizer = sequence, tokenizer
        self._text = _make_text(sequence, tokenizer)
        self._prompt: list[TokenInfo | None] = [None]
        self._awaits_prompt = sequence.sampling.prompt_logprobs is not None
        self._logprob_sum = 0.0
        self.thinking_tokens = 0
        self.ended: SequenceEnded | None = None

    @property
    def calls_in_thinking(self) -> int:
        return self._text.in_thinking

    def write(self, result: SequenceResult) -> list[Event]:
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


class _UnparsedText:
    """Text as it stands, up to a stop string. A token's logprobs come with the text in which it begins."""

    called = done = thinking = False
    in_thinking = 0
    missing = ""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer) -> None:
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


class _ParsedText:
    """Text that is read for thinking and calls. Tokens' logprobs come with the first event after them."""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer) -> None:
        reading = sequence.request.reading
        assert reading is not None
        self._index = sequence.index
        self._detokenizer = tokenizer.detokenizer(tokenizer.special_within(reading.format.markers))
        self._answer = AnswerParser(sequence.index, reading, sequence.request.stop)
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


def _make_text(sequence: TokenSequence, tokenizer: Tokenizer) -> _UnparsedText | _ParsedText:
    return (_UnparsedText if sequence.request.reading is None else _ParsedText)(sequence, tokenizer)


class AnswerParser:
    """One sequence's. Text goes in as it is decoded; after `stopped_by` or `done` is set, nothing follows.

    Stop strings are looked for in the content alone: neither thinking nor the arguments of a call end an answer.
    """

    def __init__(self, index: int, reading: AnswerParsing, stop: Stop) -> None:
        self._index, self._reading, self._stop = index, reading, stop
        ids = call_id_maker(reading.format.ids, past_calls=reading.past_calls)
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


PHASES: tuple[Phase, ...] = ("queued", "prefill", "decode")
NOT_SEARCHED: frozenset[CacheReason] = frozenset({"off", "scored", "disabled"})
"""Why no prefix was looked for."""


class ActiveRequest:
    def __init__(
        self, request: Request, reader: EventSink, sequences: list[TokenSequence], tokenizer: Tokenizer
    ) -> None:
        self.request, self.reader, self.sequences = request, reader, sequences
        self.writers = {sequence: SequenceOutput(sequence, tokenizer) for sequence in sequences}

    @property
    def phase(self) -> Phase:
        """The phase of the sequence that is furthest on."""
        phases = [sequence.phase for sequence in self.sequences if not sequence.ended]
        return max(phases, key=PHASES.index, default="decode")

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self.request.prompts),
            completion_tokens=sum(sequence.produced for sequence in self.sequences),
            cached_tokens=sum(sequence.cached for sequence in self.sequences[:: self.request.n]),
            thinking_tokens=sum(writer.thinking_tokens for writer in self.writers.values()),
        )

    def ended(self, now: float) -> Ended:
        in_thinking = sum(writer.calls_in_thinking for writer in self.writers.values())
        return Ended(
            self.usage(),
            self.timing(now),
            self._reports(),
            self.speculation(),
            self._specprefill_reports(),
            in_thinking,
        )

    def speculation(self) -> SpeculationReport:
        return SpeculationReport(
            proposed=sum(sequence.proposed for sequence in self.sequences),
            accepted=sum(sequence.accepted for sequence in self.sequences),
            passes=sum(sequence.passes for sequence in self.sequences),
        )

    def _reports(self) -> tuple[CacheReport, ...]:
        firsts = self.sequences[:: self.request.n]
        return tuple(sequence.report for sequence in firsts if sequence.report is not None)

    def _specprefill_reports(self) -> tuple[SpecPrefillReport, ...]:
        firsts = self.sequences[:: self.request.n]
        return tuple(sequence.sparse for sequence in firsts if sequence.sparse is not None)

    def timing(self, now: float) -> Timing:
        arrived = self.request.arrived
        began = min((at for s in self.sequences for at in (s.scoring_at, s.admitted_at) if at is not None), default=now)
        first = min((s.first_token_at for s in self.sequences if s.first_token_at is not None), default=now)
        return Timing(queue=began - arrived, prefill=first - began, decode=now - first)

    def status(self, now: float) -> RequestStatus:
        usage = self.usage()
        first = min((s.first_token_at for s in self.sequences if s.first_token_at is not None), default=None)
        since = now - first if first is not None else 0.0
        return RequestStatus(
            id=self.request.id,
            phase=self.phase,
            prompt_tokens=usage.prompt_tokens,
            prefilled_tokens=sum(self._prefilled()),
            completion_tokens=usage.completion_tokens,
            max_tokens=sum(sequence.limit for sequence in self.sequences),
            age_s=now - self.request.arrived,
            tokens_per_second=usage.completion_tokens / since if since > 0 else 0.0,
            preemptions=sum(sequence.preemptions for sequence in self.sequences),
            tenant=self.request.tenant,
            cache=self._reports(),
            first_token_s=None if first is None else first - self.request.arrived,
            queued_s=self.timing(now).queue,
            adapter="" if self.request.lora is None else self.request.lora.name,
        )

    def _prefilled(self) -> Iterator[int]:
        """How much of each prompt is computed, for the answer that is furthest on."""
        for first in range(0, len(self.sequences), self.request.n):
            answers = self.sequences[first : first + self.request.n]
            yield max(answer.position(min(answer.computed, len(answer.prompt))) for answer in answers)

    def outcome(self) -> str:
        """Why its answers ended."""
        reasons = {writer.ended.reason for writer in self.writers.values() if writer.ended is not None}
        return ", ".join(sorted(reasons))


log = logging.getLogger("ingot.engine")


class Outbox:
    """The engine thread's alone."""

    def __init__(self) -> None:
        self._events: dict[ActiveRequest, list[Event]] = {}

    def put(self, job: ActiveRequest, events: list[Event]) -> None:
        if events:
            self._events.setdefault(job, []).extend(events)

    def flush(self, gone: Callable[[ActiveRequest], None]) -> None:
        """Hand out what is here. `gone` ends the job of a reader who takes nothing; nobody is told of that end."""
        events, self._events = self._events, {}
        for job, told in events.items():
            try:
                job.reader.post(told)
            except Exception:
                id = job.request.id
                log.exception("nobody takes the events of request %s; it ends", id, extra=log_facts(id, event="failed"))
                gone(job)
                self._events.pop(job, None)

    def send_off(self, job: ActiveRequest, last: Event) -> None:
        """Hand out a job's events and the last one, whatever its reader makes of it."""
        with suppress(Exception):
            job.reader.post([*self._events.pop(job, ()), last])
