"""Output: from a sequence's tokens to the events that a request's reader gets.

`SequenceOutput` detokenizes, matches stop strings, parses thinking and tool calls where the model's family writes them,
and decides why an answer ended. `ActiveRequest` is a request while it runs: its sequences, their output and its status.
`Outbox` delivers a step's events, so that each reader is woken once a step. For the engine thread alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, cast

from ingot.engine.forward_pass import Logprobs, SequenceResult
from ingot.engine.loop_guard import LoopGuard
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
    LoopReport,
    Phase,
    PromptScored,
    Request,
    RequestStatus,
    SequenceEnded,
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
from ingot.observe.metrics import ExpertStats
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

log = logging.getLogger("ingot.engine")


class SequenceOutput:
    """Turns the results of one sequence into events. When `ended` is set, its `SequenceEnded` has been written."""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer) -> None:
        self._sequence, self._tokenizer = sequence, tokenizer
        reading = sequence.request.reading
        self._text = _PlainText(sequence, tokenizer) if reading is None else _ParsedText(sequence, tokenizer, reading)
        self._prompt: list[TokenInfo | None] = [None]
        self._scores_prompt = sequence.sampling.prompt_logprobs is not None
        self._logprob_sum = 0.0
        self.thinking_tokens = 0
        self._guard, self._loop = LoopGuard.of(sequence, tokenizer), cast("LoopReport | None", None)
        self.ended: SequenceEnded | None = None

    @property
    def calls_in_thinking(self) -> int:
        return self._text.calls_in_thinking

    def write(self, result: SequenceResult) -> list[Event]:
        """The events that follow from a result, whose token is the sequence's newest."""
        events = self._add_prompt_logprobs(result.prompt) if self._scores_prompt else []
        if self._sequence.limit == 0:
            return events if self._scores_prompt else events + self.finish("length")
        if result.token is not None:
            events += self._add_token(result.token, result.logprobs)
        return events

    def finish(self, reason: FinishReason, stopped_by: str | int | None = None) -> list[Event]:
        """Write what was held back, and the end."""
        events = self._text.finish(cut=reason == "length")
        if self._text.stopped_by is not None:
            return self._end(events, "stop", self._text.stopped_by)
        return self._end(events, reason, stopped_by)

    def _add_prompt_logprobs(self, scored: tuple[Logprobs, ...]) -> list[Event]:
        top = self._sequence.sampling.prompt_logprobs or 0
        self._prompt += [self._info(logprobs, top) for logprobs in scored]
        if len(self._prompt) < len(self._sequence.prompt):
            return []
        self._scores_prompt = False
        return [PromptScored(self._sequence.index, tuple(self._prompt))]

    def _add_token(self, token: int, logprobs: Logprobs | None) -> list[Event]:
        count, top = self._sequence.produced, self._sequence.sampling.logprobs
        info = None
        if top is not None and logprobs is not None:
            self._logprob_sum += logprobs.chosen[1]
            info = self._info(logprobs, top)
        if token in self._sequence.stop_tokens and count > self._sequence.request.stop.min_tokens:
            return self.finish("stop", token)
        events = self._text.add_token(token, info)
        self.thinking_tokens += self._text.thinking
        if self._text.stopped_by is not None or self._text.done:
            return self._end(events, "stop", self._text.stopped_by)
        if count < self._sequence.limit and self._guard is not None:
            self._loop = self._guard.look()
        over = self._loop is not None or count >= self._sequence.limit
        return [*events, *self.finish("length")] if over else list(events)

    def _end(self, events: list[AnswerEvent], reason: FinishReason, stopped_by: str | int | None) -> list[Event]:
        if reason == "stop" and self._text.called and not isinstance(stopped_by, str):
            reason = "tool_calls"
        sequence = self._sequence
        self.ended = SequenceEnded(
            sequence.index,
            reason,
            stopped_by,
            sequence.produced,
            self._logprob_sum if sequence.sampling.logprobs is not None else None,
            self.thinking_tokens,
            tuple(sequence.generated),
            self._text.missing,
            self._loop,
        )
        return [*events, self.ended]

    def _info(self, logprobs: Logprobs, top: int) -> TokenInfo:
        return TokenInfo(self._entry(*logprobs.chosen), tuple(self._entry(*pair) for pair in logprobs.top[:top]))

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TokenLogprob(token, raw.decode("utf-8", errors="replace"), raw, logprob)


class _PlainText:
    """Unparsed text, up to a stop string. A token's logprobs come with the text in which it begins."""

    called = done = thinking = False
    calls_in_thinking = 0
    missing = ""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer) -> None:
        self._index = sequence.index
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopMatcher(sequence.request.stop.strings, sequence.request.stop.keep)
        self._waiting: list[tuple[int, TokenInfo]] = []  # where a token's text begins, and the token
        self._decoded = self._released = 0  # characters
        self.stopped_by: str | None = None

    def add_token(self, token: int, info: TokenInfo | None) -> list[AnswerEvent]:
        if info is not None:
            self._waiting.append((self._decoded, info))
        return self._release(self._match_stops(self._detokenizer.push(token)))

    def finish(self, *, cut: bool) -> list[AnswerEvent]:
        text = self._match_stops(self._detokenizer.flush())
        if self.stopped_by is not None:
            return self._release(text)
        events = self._release(text + self._stops.flush())
        infos = tuple(info for _, info in self._waiting)
        return [*events, TextDelta(self._index, "", infos)] if infos else events

    def _match_stops(self, text: str) -> str:
        self._decoded += len(text)
        content = self._stops.push(text)
        self.stopped_by = content.stopped_by
        return content.text

    def _release(self, text: str) -> list[AnswerEvent]:
        self._released += len(text)
        ready = [info for begins, info in self._waiting if begins < self._released]
        self._waiting = self._waiting[len(ready) :]
        return [TextDelta(self._index, text, tuple(ready))] if text or ready else []


class AnswerParser:
    """Parses one sequence's text for thinking and tool calls. After `stopped_by` or `done` is set, nothing follows.

    Stop strings are matched in the content alone: neither thinking nor the arguments of a call end an answer.
    """

    def __init__(self, index: int, reading: AnswerParsing, stop: Stop) -> None:
        self._index, self._reading, self._stop = index, reading, stop
        ids = call_id_maker(reading.format.ids, past_calls=reading.past_calls)
        self._parser = Parser(
            reading.format, tools=reading.tools, thinking=reading.thinking, ids=ids, must_call=reading.must_call
        )
        self._stops = StopMatcher(stop.strings, stop.keep)
        self.called = False  # at least one call is complete
        self.calls_in_thinking = 0
        self.done = False  # the one call that was allowed is complete
        self.stopped_by: str | None = None

    def push(self, text: str) -> list[AnswerEvent]:
        return self._translate(self._parser.push(text))

    def flush(self, *, cut: bool) -> list[AnswerEvent]:
        """The text has ended, or was `cut` off."""
        events = self._translate(self._parser.flush(cut=cut))
        return events if self._over else [*events, *self._flush_content()]

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

    def _translate(self, parsed: list[ParsedEvent]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for event in parsed:
            if self._over:
                break
            events += self._answer_events(event)
        return events

    def _answer_events(self, event: ParsedEvent) -> list[AnswerEvent]:
        index = self._index
        match event:
            case ContentDelta():
                content = self._stops.push(event.text)
                self.stopped_by = content.stopped_by
                return [TextDelta(index, content.text)] if content.text else []
            case ReasoningDelta():
                return [*self._flush_content(), ThinkingDelta(index, event.text)]
            case ToolCallBegan():
                self.calls_in_thinking += event.in_thinking
                return [*self._flush_content(), CallBegan(index, event.index, event.id, event.name)]
            case ToolCallArguments():
                return [CallArguments(index, event.index, event.fragment)]
            case ToolCallEnded():
                self.called = self.called or event.complete
                self.done = self._reading.one_call and event.complete
                return [CallEnded(index, event.index, event.complete)]

    def _flush_content(self) -> list[AnswerEvent]:
        """Something else follows the content: what was held back for a stop string is content after all."""
        text = self._stops.flush()
        self._stops = StopMatcher(self._stop.strings, self._stop.keep)
        return [TextDelta(self._index, text)] if text else []


class _ParsedText(AnswerParser):
    """The same by tokens. Their logprobs come with the first event after them."""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer, reading: AnswerParsing) -> None:
        super().__init__(sequence.index, reading, sequence.request.stop)
        self._detokenizer = tokenizer.detokenizer(tokenizer.special_within(reading.format.markers))
        self._waiting: list[TokenInfo] = []

    def add_token(self, token: int, info: TokenInfo | None) -> list[AnswerEvent]:
        if info is not None:
            self._waiting.append(info)
        text = self._detokenizer.push(token)
        events = self.push(text) if text else []
        return [*self._release(), *events] if events else []

    def finish(self, *, cut: bool) -> list[AnswerEvent]:
        text = self._detokenizer.flush()
        events = self.push(text) if text else []
        if not self._over:
            events += self.flush(cut=cut)
        return [*self._release(), *events]

    def _release(self) -> list[AnswerEvent]:
        infos, self._waiting = tuple(self._waiting), []
        return [TextDelta(self._index, "", infos)] if infos else []


REPETITION: Final = "repetition"
"""How the log and the metrics call the end of an answer in a loop."""
PHASES: tuple[Phase, ...] = ("queued", "prefill", "decode")
NOT_SEARCHED: frozenset[CacheReason] = frozenset({"off", "scored", "disabled"})
"""Reasons for which no prefix was looked up."""


class ActiveRequest:
    def __init__(
        self, request: Request, reader: EventSink, sequences: list[TokenSequence], tokenizer: Tokenizer
    ) -> None:
        self.request, self.reader, self.sequences = request, reader, sequences
        self.writers = {sequence: SequenceOutput(sequence, tokenizer) for sequence in sequences}
        self.experts_before: ExpertStats | None = None
        """What had happened when it began, where experts are read when they are needed."""

    @property
    def phase(self) -> Phase:
        """The phase of the most advanced sequence."""
        phases = [sequence.phase for sequence in self.sequences if not sequence.ended]
        return max(phases, key=PHASES.index, default="decode")

    @property
    def _by_prompt(self) -> list[TokenSequence]:
        """The first sequence of each prompt."""
        return self.sequences[:: self.request.n]

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self.request.prompts),
            completion_tokens=sum(sequence.produced for sequence in self.sequences),
            cached_tokens=sum(sequence.cached for sequence in self._by_prompt),
            thinking_tokens=sum(writer.thinking_tokens for writer in self.writers.values()),
        )

    def ended(self, now: float, experts: ExpertStats | None = None) -> Ended:
        speculation = SpeculationReport(
            proposed=sum(sequence.proposed for sequence in self.sequences),
            accepted=sum(sequence.accepted for sequence in self.sequences),
            passes=sum(sequence.passes for sequence in self.sequences),
        )
        return Ended(
            self.usage(),
            self.timing(now),
            self._cache_reports(),
            speculation,
            tuple(sequence.specprefill for sequence in self._by_prompt if sequence.specprefill is not None),
            sum(writer.calls_in_thinking for writer in self.writers.values()),
            tuple(end.loop for end in self._ends if end.loop is not None),
            None if experts is None or self.experts_before is None else experts.since(self.experts_before),
        )

    @property
    def _ends(self) -> list[SequenceEnded]:
        return [writer.ended for writer in self.writers.values() if writer.ended is not None]

    def _cache_reports(self) -> tuple[CacheReport, ...]:
        return tuple(sequence.report for sequence in self._by_prompt if sequence.report is not None)

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
            cache=self._cache_reports(),
            first_token_s=None if first is None else first - self.request.arrived,
            queued_s=self.timing(now).queue,
            adapter="" if self.request.lora is None else self.request.lora.name,
        )

    def _prefilled(self) -> Iterator[int]:
        """How much of each prompt is computed, for its most advanced answer."""
        for first in range(0, len(self.sequences), self.request.n):
            answers = self.sequences[first : first + self.request.n]
            yield max(answer.position(min(answer.computed, len(answer.prompt))) for answer in answers)

    def outcome(self) -> str:
        """Why its answers ended."""
        return ", ".join(sorted({REPETITION if end.loop is not None else end.reason for end in self._ends}))

    @property
    def ending(self) -> str:
        """The same for metrics, where a request has one."""
        reasons = self.outcome()
        return next((reason for reason in (REPETITION, "length") if reason in reasons), "stop")


class Outbox:
    def __init__(self) -> None:
        self._events: dict[ActiveRequest, list[Event]] = {}

    def put(self, job: ActiveRequest, events: list[Event]) -> None:
        if events:
            self._events.setdefault(job, []).extend(events)

    def flush(self, gone: Callable[[ActiveRequest], None]) -> None:
        """Deliver the events. `gone` ends a request whose reader fails; the events of that end are dropped."""
        pending, self._events = self._events, {}
        for job, events in pending.items():
            try:
                job.reader.post(events)
            except Exception:
                id = job.request.id
                facts = log_facts(id, event="failed")
                log.exception("the reader of request %s takes no events; the request ends", id, extra=facts)
                gone(job)
                self._events.pop(job, None)

    def send_last(self, job: ActiveRequest, last: Event) -> None:
        """Deliver a request's events and the last one, even if its reader fails."""
        with suppress(Exception):
            job.reader.post([*self._events.pop(job, ()), last])
