"""From a sequence's tokens to the events that its reader sees: text, logprobs, and why it ended."""

from __future__ import annotations

from ingot.engine.request import Event, FinishReason, PromptScored, SequenceEnded, TextDelta, TokenInfo, TokenLogprob
from ingot.engine.runner import Logprobs, Result
from ingot.engine.sequence import Sequence
from ingot.text.stops import StopMatcher
from ingot.text.tokenizer import Tokenizer


class Writer:
    """Turns results of one sequence into events. When `ended` is set, its `SequenceEnded` has been written."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._sequence, self._tokenizer = sequence, tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopMatcher(sequence.request.stop.strings, sequence.request.stop.keep)
        self._prompt: list[TokenInfo | None] = [None]
        self._awaits_prompt = sequence.sampling.prompt_logprobs is not None
        self._held: list[tuple[int, TokenInfo]] = []  # where its text begins, and the token
        self._decoded = self._released = 0  # characters
        self._logprob_sum = 0.0
        self.ended: SequenceEnded | None = None

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
        rest = self._detokenizer.flush()
        self._decoded += len(rest)
        found = self._stops.push(rest)
        if found.stopped_by is not None:
            return self._end(found.text, "stop", found.stopped_by)
        return self._end(found.text + self._stops.flush(), reason, stopped_by)

    def _score(self, scored: tuple[Logprobs, ...]) -> list[Event]:
        self._prompt += [self._info(logprobs, top=self._sequence.sampling.prompt_logprobs or 0) for logprobs in scored]
        if len(self._prompt) < len(self._sequence.prompt):
            return []
        self._awaits_prompt = False
        return [PromptScored(self._sequence.index, tuple(self._prompt))]

    def _token(self, token: int, logprobs: Logprobs | None) -> list[Event]:
        count = self._sequence.produced
        wanted = self._sequence.sampling.logprobs
        if wanted is not None and logprobs is not None:
            self._logprob_sum += logprobs.chosen[1]
        if token in self._sequence.stop_tokens and count > self._sequence.request.stop.min_tokens:
            return self.finish("stop", token)
        if wanted is not None and logprobs is not None:
            self._held.append((self._decoded, self._info(logprobs, top=wanted)))
        text = self._detokenizer.push(token)
        self._decoded += len(text)
        found = self._stops.push(text)
        if found.stopped_by is not None:
            return self._end(found.text, "stop", found.stopped_by)
        events = self._release(found.text)
        return events + self.finish("length") if count >= self._sequence.limit else events

    def _release(self, text: str) -> list[Event]:
        """Hand out text, with the tokens that begin in it."""
        self._released += len(text)
        ready = [info for begins, info in self._held if begins < self._released]
        self._held = self._held[len(ready) :]
        return [TextDelta(self._sequence.index, text, tuple(ready))] if text or ready else []

    def _end(self, text: str, reason: FinishReason, stopped_by: str | int | None) -> list[Event]:
        events = self._release(text)
        if self._held and not isinstance(stopped_by, str):
            events.append(TextDelta(self._sequence.index, "", tuple(info for _, info in self._held)))
        self._held = []
        total = self._logprob_sum if self._sequence.sampling.logprobs is not None else None
        count = self._sequence.produced
        self.ended = SequenceEnded(self._sequence.index, reason, stopped_by, count, total)
        return [*events, self.ended]

    def _info(self, logprobs: Logprobs, top: int) -> TokenInfo:
        return TokenInfo(self._entry(*logprobs.chosen), tuple(self._entry(*pair) for pair in logprobs.top[:top]))

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TokenLogprob(token, raw.decode("utf-8", errors="replace"), raw, logprob)
