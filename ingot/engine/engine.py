"""Engines as other threads see them: requests in, streams of events, vectors or audio out.

`ModelEngine` serves models that do not generate (pooling, speech-to-text, text-to-speech); `Engine` serves one
that generates, and those beside it. Any thread may call them. Plain values go through a mailbox to the loop's
thread, the only one that touches mlx, and plain values come back. A constructor returns when the model is loaded,
or raises what went wrong; `close` or `leave` is the last call.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.engine.admission import EngineLimits, ServedLoras
from ingot.engine.cache_admin import PrefixCacheAdmin
from ingot.engine.core import GenerationWorkload, LoadedModel
from ingot.engine.loop import Loop, Workload, engine_loop
from ingot.engine.pooling import PoolingWorkload
from ingot.engine.pooling_batches import ServedPoolingModel
from ingot.engine.request import (
    LoraRef,
    ModelCard,
    PoolingModelCard,
    PoolingOutput,
    PoolingRequest,
    PoolingTask,
    Request,
    RequestStatus,
)
from ingot.engine.speech_request import (
    OnTranscriptEvents,
    SpeechRequest,
    SpeechToTextCard,
    TextToSpeechCard,
    TranscriptionRequest,
)
from ingot.engine.speech_to_text import ServedSpeechToText, TranscriptionWorkload, TranscriptStream
from ingot.engine.status import Health
from ingot.engine.streams import BlockingStream, EventSink, EventStream
from ingot.engine.text_to_speech import ServedTextToSpeech, SpeechStream, SpeechWorkload
from ingot.errors import Cancelled, ClientLeft, IngotError, Unavailable, Unsupported
from ingot.kernels.memory import release_unused_memory
from ingot.media.layout import MediaProcessor
from ingot.observe.metrics import EngineMetrics, SpeculationMetrics
from ingot.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ingot.engine.core import LoadedModel


@dataclass(frozen=True, slots=True)
class SideModels:
    """What was loaded to serve alone, or beside a model that generates, and what it takes of the memory budget."""

    encoders: Mapping[PoolingTask, ServedPoolingModel] = field(default_factory=dict)
    hearing: ServedSpeechToText | None = None
    speaking: ServedTextToSpeech | None = None
    weights: int = 0
    batch: int = 0  # of what is computed at once

    @property
    def taken(self) -> int:
        return self.weights + self.batch

    @property
    def cards(self) -> list[PoolingModelCard | SpeechToTextCard | TextToSpeechCard]:
        found = [*self.encoders.values(), self.hearing, self.speaking]
        return [offered.card for offered in found if offered is not None]

    @property
    def card(self) -> PoolingModelCard | SpeechToTextCard | TextToSpeechCard:
        """Of the one that serves alone."""
        return self.cards[0]

    @property
    def notes(self) -> list[str]:
        return [f"{card.name}: {note}" for card in self.cards for note in card.notes]


class ModelEngine:
    """Started by the constructor, which returns when the model is loaded or raises what went wrong. It runs on a loop
    of its own, or on one that it shares with the engines of other models."""

    def __init__(
        self, load: Callable[[], SideModels | LoadedModel], limits: EngineLimits, loop: Loop | None = None
    ) -> None:
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
        self._encodings = PoolingWorkload(
            loaded.encoders, lambda letter: self._loop.post(self._encodings, letter), queue, target
        )
        self._transcripts = TranscriptionWorkload(
            loaded.hearing, lambda letter: self._loop.post(self._transcripts, letter), queue, target
        )
        self._speeches = SpeechWorkload(
            loaded.speaking, lambda letter: self._loop.post(self._speeches, letter), queue, target
        )
        return self._encodings, self._transcripts, self._speeches

    @property
    def card(self) -> ModelCard | PoolingModelCard | SpeechToTextCard | TextToSpeechCard:
        return self._loaded.card

    @property
    def encoders(self) -> Mapping[PoolingTask, ServedPoolingModel]:
        return self._loaded.encoders

    @property
    def hearing(self) -> ServedSpeechToText | None:
        """The model that writes down what is spoken; None: there is none."""
        return self._loaded.hearing

    @property
    def speaking(self) -> ServedTextToSpeech | None:
        """The model that speaks what is written; None: there is none."""
        return self._loaded.speaking

    async def encode(self, request: PoolingRequest) -> PoolingOutput:
        """Vectors or scores of texts. Raises before any work what can be known then; a cancelled wait ends the work."""
        self._loop.refuse_if_stopped()
        return await self._encodings.encode(request)

    def transcribe(self, request: TranscriptionRequest) -> TranscriptStream:
        """What is spoken in a sound, segment by segment. From a coroutine; raises at once what can be known at once."""
        self._loop.refuse_if_stopped()
        return self._transcripts.open(request)

    def hear(self, request: TranscriptionRequest, reply: OnTranscriptEvents) -> None:
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

    def on_device_lost(self, call: Callable[[], None]) -> None:
        """Have `call` made once the device is lost and everybody who waited was told: see `Loop.when_lost`."""
        self._loop.on_device_lost(call)

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
        before = release_unused_memory()
        self._loop.remove(self._let_go(), Unavailable("The model was unloaded", retry_after=1))
        return before - release_unused_memory()

    def _let_go(self) -> Sequence[Workload]:
        """The workloads, and nothing here that holds them or the model any more."""
        workloads = self._encodings, self._transcripts, self._speeches
        del self._loaded, self._encodings, self._transcripts, self._speeches
        return workloads


class Engine(ModelEngine):
    """Of a model that generates, and of those that serve beside it."""

    _loaded: LoadedModel

    def _begun(self) -> Sequence[Workload]:
        """Answers come first: what others may take of a turn depends on what is left."""
        loaded = self._loaded
        if loaded.disk is not None:
            loaded.disk.writer.wrote = self._loop.wake
        self._generation = GenerationWorkload(
            loaded, self._limits, lambda letter: self._loop.post(self._generation, letter)
        )
        return self._generation, *super()._begun()

    @property
    def card(self) -> ModelCard:
        return self._loaded.card

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def processor(self) -> MediaProcessor | None:
        """How the model is shown pictures and clips; None: it has no vision tower."""
        return self._loaded.processor

    @property
    def loras(self) -> Mapping[str, LoraRef]:
        """The adapters that may be asked for, by name."""
        return {} if self._loaded.loras is None else self._loaded.loras.named

    def load_lora(self, name: str, folder: Path) -> LoraRef:
        """Serve an adapter from now on. Raises AdapterError."""
        loras = self._served_loras()
        return self._loop.run(lambda: loras.load(name, folder))

    def unload_lora(self, name: str) -> None:
        """Those that run with it go on. Raises ModelNotFound."""
        loras = self._served_loras()
        self._loop.run(lambda: loras.unload(name))

    def _served_loras(self) -> ServedLoras:
        if self._loaded.loras is None:
            raise Unsupported("This server was started without adapters.")
        return self._loaded.loras

    @property
    def kept(self) -> PrefixCacheAdmin:
        """The prefixes that are kept."""
        loaded, loop = self._loaded, self._loop
        return PrefixCacheAdmin(
            lambda work: loop.run(lambda: work(self._generation.reuse)),
            loaded.adapter,
            loaded.folder,
            loaded.disk,
            loaded.codec,
        )

    async def open(self, request: Request) -> EventStream:
        """Accept a request from a coroutine. Raises at once what can be known at once.

        A long prompt takes a while to look at, which must not hold up the loop.
        """
        stream = EventStream(partial(self._cancel, request.id))
        left = threading.Event()

        def accept() -> None:
            self._accept(request, stream)
            if left.is_set():
                stream.close()

        try:
            await asyncio.to_thread(accept)
        except asyncio.CancelledError:  # which does not stop the thread: whichever comes second closes the stream
            left.set()
            self._cancel(request.id, ClientLeft("The client left"))
            raise
        return stream

    def generate(self, request: Request) -> BlockingStream:
        """Accept a request from a plain thread."""
        stream = BlockingStream()
        self._accept(request, stream)
        return stream

    def status(self) -> list[RequestStatus]:
        return [*self._generation.status(time.monotonic()), *super().status()]

    @property
    def refused(self) -> int:
        return self._generation.refused

    @property
    def last_step(self) -> int:
        """The number of the last forward pass that other ranks were told of; 0 where there are none."""
        return self._loaded.adapter.last_step

    @property
    def ranks_trouble(self) -> str:
        """Why other ranks cannot be told anything any more; empty while they can, and where there are none."""
        return self._loaded.adapter.ranks_trouble

    def memory(self) -> tuple[int, int]:
        """Bytes that exist for states, and those of them that running sequences and kept prefixes hold."""
        return self._loop.run(lambda: self._generation.memory)

    @property
    def figures(self) -> EngineMetrics:
        """What was done since the start, and how full the engine is; any thread may read it."""
        return self._generation.figures

    @property
    def speculation(self) -> SpeculationMetrics:
        """What guessing ahead did; any thread may read it."""
        return self._generation.speculation

    def _let_go(self) -> Sequence[Workload]:
        workloads = self._generation, *super()._let_go()
        del self._generation
        return workloads

    def _accept(self, request: Request, reader: EventSink) -> None:
        self._loop.refuse_if_stopped()
        self._generation.enter(request, reader)

    def _cancel(self, request_id: str, cause: IngotError) -> bool:
        return self._generation.cancel(request_id, cause) or super()._cancel(request_id, cause)
