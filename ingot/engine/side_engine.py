"""The engine of models that do not generate by steps, as other threads see it: texts in and vectors out, sounds in and
segments out. Models that do so may serve alone, or beside one that generates (`engine`).

Any thread may call it. Plain values go through a mailbox to the loop's thread, the only one that touches mlx, and plain
values come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ingot.engine.admission import Limits
from ingot.engine.encoder_request import Encoded, EncoderCard, EncodingRequest, Role
from ingot.engine.engine_thread import engine_loop
from ingot.engine.health import Health
from ingot.engine.hearing.jobs import OfferedHearing, TranscriptJobs
from ingot.engine.hearing.stream import TranscriptStream
from ingot.engine.loop import Loop, Workload
from ingot.engine.model_card import ModelCard
from ingot.engine.pooling import EncoderJobs
from ingot.engine.pooling_batches import OfferedEncoder
from ingot.engine.request import RequestStatus
from ingot.engine.speaking.request import SpeakingCard, SpeechRequest
from ingot.engine.speech_request import HearingCard, OnTranscript, TranscriptionRequest
from ingot.engine.text_to_speech import OfferedSpeech, SpeechJobs, SpeechStream
from ingot.errors import Cancelled, IngotError, Unavailable
from ingot.kernels.memory import give_back_memory


class Offers(Protocol):
    """What was loaded: the model that is named, and what serves beside generation."""

    @property
    def card(self) -> ModelCard | EncoderCard | HearingCard | SpeakingCard: ...

    @property
    def encoders(self) -> Mapping[Role, OfferedEncoder]: ...

    @property
    def hearing(self) -> OfferedHearing | None: ...

    @property
    def speaking(self) -> OfferedSpeech | None: ...


@dataclass(frozen=True, slots=True)
class SideModel:
    """One model, which serves alone."""

    card: EncoderCard | HearingCard | SpeakingCard
    encoders: Mapping[Role, OfferedEncoder] = field(default_factory=dict)
    hearing: OfferedHearing | None = None
    speaking: OfferedSpeech | None = None


class SideEngine:
    """Started by the constructor, which returns when the model is loaded or raises what went wrong. It runs on a loop
    of its own, or on one that it shares with the engines of other models."""

    def __init__(self, load: Callable[[], Offers], limits: Limits, loop: Loop | None = None) -> None:
        self._load, self._limits = load, limits
        self._shares_loop = loop is not None
        if loop is not None:
            self._loop = loop
            loop.add(self._workloads)
        else:
            self._loop = engine_loop(self._workloads)
            self._loop.start()

    def _workloads(self) -> Sequence[Workload]:
        self._loaded = self._load()
        return self._begun()

    def _begun(self) -> Sequence[Workload]:
        """What the loop is to run of what was loaded. On its thread."""
        loaded = self._loaded
        queue, target = self._limits.max_queue, self._limits.target_itl_ms
        self._encodings = EncoderJobs(
            loaded.encoders, lambda letter: self._loop.post(self._encodings, letter), queue, target
        )
        self._transcripts = TranscriptJobs(
            loaded.hearing, lambda letter: self._loop.post(self._transcripts, letter), queue, target
        )
        self._speeches = SpeechJobs(
            loaded.speaking, lambda letter: self._loop.post(self._speeches, letter), queue, target
        )
        return self._encodings, self._transcripts, self._speeches

    @property
    def card(self) -> ModelCard | EncoderCard | HearingCard | SpeakingCard:
        return self._loaded.card

    @property
    def encoders(self) -> Mapping[Role, OfferedEncoder]:
        return self._loaded.encoders

    @property
    def hearing(self) -> OfferedHearing | None:
        """The model that writes down what is spoken; None: there is none."""
        return self._loaded.hearing

    @property
    def speaking(self) -> OfferedSpeech | None:
        """The model that speaks what is written; None: there is none."""
        return self._loaded.speaking

    async def encode(self, request: EncodingRequest) -> Encoded:
        """Vectors or scores of texts. Raises before any work what can be known then; a cancelled wait ends the work."""
        self._loop.refuse_if_stopped()
        return await self._encodings.encode(request)

    def transcribe(self, request: TranscriptionRequest) -> TranscriptStream:
        """What is spoken in a sound, segment by segment. From a coroutine; raises at once what can be known at once."""
        self._loop.refuse_if_stopped()
        return self._transcripts.open(request)

    def hear(self, request: TranscriptionRequest, reply: OnTranscript) -> None:
        """The same from a plain thread; `reply` is called from the engine thread, with events as they come."""
        self._loop.refuse_if_stopped()
        self._transcripts.accept(request, reply)

    def speak(self, request: SpeechRequest) -> SpeechStream:
        """The sound of a text, piece by piece. From a coroutine; raises at once what can be known at once."""
        self._loop.refuse_if_stopped()
        return self._speeches.open(request)

    def cancel(self, request_id: str) -> bool:
        """End a request, wherever it is. False if there is none of that id."""
        return self._cancel(request_id, Cancelled("The request was cancelled"))

    def _cancel(self, request_id: str, cause: IngotError) -> bool:
        return (
            self._encodings.cancel(request_id)
            or self._transcripts.cancel(request_id, cause)
            or self._speeches.cancel(request_id, cause)
        )

    def status(self) -> list[RequestStatus]:
        now = time.monotonic()
        return [*self._encodings.status(now), *self._transcripts.status(now), *self._speeches.status(now)]

    def side_loads(self) -> dict[str, tuple[int, int]]:
        """Of each model that does not generate, by its name: requests that are computed, and those that wait."""
        now = time.monotonic()
        each = {offered.card.name: self._encodings.phases(role) for role, offered in self.encoders.items()}
        if self.hearing is not None:
            each[self.hearing.card.name] = [status.phase for status in self._transcripts.status(now)]
        if self.speaking is not None:
            each[self.speaking.card.name] = [status.phase for status in self._speeches.status(now)]
        waiting = {name: phases.count("queued") for name, phases in each.items()}
        return {name: (len(phases) - waiting[name], waiting[name]) for name, phases in each.items()}

    @property
    def refused(self) -> int:
        """Requests that found the queue full, where those are counted."""
        return 0

    def health(self) -> Health:
        pulse = self._loop.pulse()
        phases = [status.phase for status in self.status()]
        running = sum(phase != "queued" for phase in phases)
        waiting = len(phases) - running
        return Health(pulse.alive, pulse.ready, pulse.detail, pulse.beat_ago_s, running, waiting, self.refused)

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have `call` made once the device is lost and everybody who waited was told: see `Loop.when_lost`."""
        self._loop.when_lost(call)

    def check(self) -> None:
        """Run the integrity check on the engine thread and wait for it; raises what it finds."""
        self._loop.check()

    def close(self) -> None:
        """Cancel what runs and end the thread, or leave it to the engines that share it, with all memory given back.
        The last call. A process that leaves without it does it on its way out."""
        if self._shares_loop:
            self.leave()
        else:
            self._loop.close()

    def leave(self) -> int:
        """Cancel what runs and leave a shared thread to the others; returns the bytes that came back. The last call."""
        return self._loop.run(self._leave)

    def _leave(self) -> int:
        """Runs on the loop's thread: arrays are freed where they were made. Others have no turn between the two looks
        at the memory, and what they left to be freed is freed before the first, so that what is missing is ours."""
        before = give_back_memory()
        self._loop.remove(self._let_go(), Unavailable("The model was unloaded", retry_after=1))
        return before - give_back_memory()

    def _let_go(self) -> Sequence[Workload]:
        """The workloads, and nothing here that holds them or the model any more."""
        workloads = self._encodings, self._transcripts, self._speeches
        del self._loaded, self._encodings, self._transcripts, self._speeches
        return workloads
