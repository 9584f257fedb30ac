"""What every answer has in common: its head, its usage, its receipt, and how a view of the events is asked for it.

A request is answered whole or streamed. Both views are fed the same events, in order, without `Failed`: the edge
turns that one into an error itself. `Ended` is always the last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import Ended, Event, Request, Usage
from ingot.protocol.bounds import LEAST_LOGPROB
from ingot.protocol.fields import Reading
from ingot.protocol.served import Served


class Whole(ABC):
    """Gathers the events of one request into one body."""

    @abstractmethod
    def take(self, event: Event) -> None: ...

    @abstractmethod
    def body(self) -> Struct:
        """The answer; asked for once, after `Ended` was taken."""


class Streamed(ABC):
    """Turns each event into the chunks that tell of it."""

    @abstractmethod
    def opening(self) -> list[Struct]:
        """The chunks that go out before the first event."""

    @abstractmethod
    def chunks(self, event: Event) -> list[Struct]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """A body, read: what the engine is to do, how its events are to be told, and which field holds the prompt."""

    request: Request
    view: Whole | Streamed
    prompt_field: str


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer and each of its chunks repeat."""

    id: str
    created: int
    model: str
    fingerprint: str
    ignored: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, id: str, created: int, served: Served, reading: Reading) -> Head:
        return cls(id, created, served.card.name, served.fingerprint, reading.ignored)


class PromptTokensDetails(Struct):
    cached_tokens: int


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> UsageBody:
        total = usage.prompt_tokens + usage.completion_tokens
        details = PromptTokensDetails(usage.cached_tokens)
        return cls(usage.prompt_tokens, usage.completion_tokens, total, details)


class TimingBody(Struct):
    """Seconds spent waiting, computing the prompt, and generating."""

    queue_s: float
    prefill_s: float
    decode_s: float


class Receipt(Struct):
    """What the server did beyond the text: how long it took, and which fields nobody knew."""

    timing: TimingBody
    ignored: list[str] | UnsetType = UNSET

    @classmethod
    def of(cls, head: Head, ended: Ended) -> Receipt:
        timing = TimingBody(
            *(round(seconds, 6) for seconds in (ended.timing.queue, ended.timing.prefill, ended.timing.decode))
        )
        return cls(timing, head.ignored or UNSET)


class Note(Struct):
    """The receipt of an answer that took no engine: which fields nobody knew."""

    ignored: list[str]

    @classmethod
    def of(cls, reading: Reading) -> Note | UnsetType:
        return cls(reading.ignored) if reading.ignored else UNSET


def sayable(logprob: float) -> float:
    """A log-probability that JSON can hold: it has no infinity."""
    return max(logprob, LEAST_LOGPROB)
