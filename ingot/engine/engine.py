"""Engines as other threads see them: requests in, streams of events, vectors or audio out.

An engine serves one model: `Engine` one that generates, `PoolingEngine`, `SpeechToTextEngine` and `TextToSpeechEngine`
the others. Any thread may call them. Plain values go through a mailbox to the loop's thread, the only one that touches
mlx, and plain values come back. A constructor returns when the model is loaded, or raises what went wrong; `close` or
`leave` is the last call.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import mlx.core as mx

from ingot.engine.admission import EngineLimits, ServedLoras
from ingot.engine.cache_admin import PrefixCacheAdmin
from ingot.engine.core import GenerationWorkload, LoadedModel
from ingot.engine.loop import Loop, PostMessage, Workload, engine_loop
from ingot.engine.pooling import PoolingWorkload, ServedPoolingModel
from ingot.engine.request import (
    LoraRef,
    ModelCard,
    PoolingModelCard,
    PoolingOutput,
    PoolingRequest,
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
from ingot.kernels.cpu import native
from ingot.media.layout import MediaProcessor
from ingot.observe.metrics import EngineMetrics, SpeculationMetrics
from ingot.text.tokenizer.tokenizer import Tokenizer

AnyCard = ModelCard | PoolingModelCard | SpeechToTextCard | TextToSpeechCard


class _Loaded(Protocol):
    @property
    def card(self) -> AnyCard: ...


class _RequestWorkload(Workload, Protocol):
    def cancel(self, request_id: str, cause: IngotError) -> bool: ...

    def status(self, now: float) -> list[RequestStatus]: ...


class ModelEngine:
    """The engine of a model of any kind. It runs on a loop of its own, or on one that it shares with the engines of
    other models."""

    _goes_first = False
    """Whether its workload is given its turn before others, which get what it leaves of the latency target."""
    _loaded: _Loaded
    _workload: _RequestWorkload

    def __init__(self, load: Callable[[], _Loaded], limits: EngineLimits, loop: Loop | None = None) -> None:
        """`load` runs on the loop's thread."""
        self._load, self._limits = load, limits
        self._shares_loop = loop is not None
        if loop is not None:
            self._loop = loop
            loop.add(self._start_workload, first=self._goes_first)
        else:
            self._loop = engine_loop(self._start_workload)
            self._loop.start()

    def _start_workload(self) -> Sequence[Workload]:
        self._loaded = self._load()
        self._workload = self._make_workload(lambda message: self._loop.post(self._workload, message))
        return (self._workload,)

    def _make_workload(self, post: PostMessage) -> _RequestWorkload:
        raise NotImplementedError

    @property
    def card(self) -> AnyCard:
        return self._loaded.card

    def cancel(self, request_id: str) -> bool:
        """End a request, wherever it is. False if there is none of that id."""
        return self._cancel(request_id, Cancelled("The request was cancelled"))

    def _cancel(self, request_id: str, cause: IngotError) -> bool:
        return self._workload.cancel(request_id, cause)

    def status(self) -> list[RequestStatus]:
        return self._workload.status(time.monotonic())

    @property
    def refused(self) -> int:
        """Requests that found the queue full, where those are counted."""
        return 0

    def health(self) -> Health:
        pulse = self._loop.pulse()
        phases = [status.phase for status in self.status()]
        waiting = phases.count("queued")
        running = len(phases) - waiting
        return Health(pulse.alive, pulse.ready, pulse.detail, pulse.beat_ago_s, running, waiting, self.refused)

    def on_device_lost(self, call: Callable[[], None]) -> None:
        """See `Loop.on_device_lost`."""
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
        workload = self._workload
        del self._loaded, self._workload
        self._loop.remove([workload], Unavailable("The model was unloaded", retry_after=1))
        del workload
        return before - release_unused_memory()


LoadedT = TypeVar("LoadedT", bound=_Loaded)
WorkloadT = TypeVar("WorkloadT", bound=_RequestWorkload)


class TaskEngine(ModelEngine, Generic[LoadedT, WorkloadT]):
    """The engine of a model that does not generate."""

    _loaded: LoadedT
    _workload: WorkloadT
    _workload_class: ClassVar[Callable[..., Any]]

    def _make_workload(self, post: PostMessage) -> WorkloadT:
        made: WorkloadT = self._workload_class(self._loaded, post, self._limits.max_queue, self._limits.target_itl_ms)
        return made

    @property
    def model(self) -> LoadedT:
        return self._loaded


class PoolingEngine(TaskEngine[ServedPoolingModel, PoolingWorkload]):
    _workload_class = PoolingWorkload

    async def encode(self, request: PoolingRequest) -> PoolingOutput:
        """Vectors or scores of texts. Raises before any work what can be known then; a cancelled wait ends the work."""
        self._loop.refuse_if_stopped()
        return await self._workload.encode(request)


class SpeechToTextEngine(TaskEngine[ServedSpeechToText, TranscriptionWorkload]):
    _workload_class = TranscriptionWorkload

    def transcribe(self, request: TranscriptionRequest) -> TranscriptStream:
        """Segments of text, as they come. From a coroutine; raises at once what can be known at once."""
        self._loop.refuse_if_stopped()
        return self._workload.open(request)

    def transcribe_to(self, request: TranscriptionRequest, reply: OnTranscriptEvents) -> None:
        """The same from a plain thread; `reply` is called from the engine thread, with events as they come."""
        self._loop.refuse_if_stopped()
        self._workload.accept(request, reply)


class TextToSpeechEngine(TaskEngine[ServedTextToSpeech, SpeechWorkload]):
    _workload_class = SpeechWorkload

    def speak(self, request: SpeechRequest) -> SpeechStream:
        """The audio of a text, piece by piece. From a coroutine; raises at once what can be known at once."""
        self._loop.refuse_if_stopped()
        return self._workload.open(request)


class Engine(ModelEngine):
    """The engine of a model that generates."""

    _goes_first = True
    _loaded: LoadedModel
    _workload: GenerationWorkload

    def _make_workload(self, post: PostMessage) -> GenerationWorkload:
        if self._loaded.disk is not None:
            self._loaded.disk.writer.wrote = self._loop.wake
        if self._loaded.adapter.experts is not None:
            self._loaded.adapter.experts.meanwhile = self._loop.run_meanwhile
        return GenerationWorkload(self._loaded, self._limits, post)

    @property
    def card(self) -> ModelCard:
        return self._loaded.card

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def processor(self) -> MediaProcessor | None:
        """How images and video become the model's input; None: it has no vision tower."""
        return self._loaded.processor

    @property
    def loras(self) -> Mapping[str, LoraRef]:
        """The LoRA adapters that requests may name."""
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
        """The prefix cache, for those who look at it and change it."""
        loaded, loop = self._loaded, self._loop
        return PrefixCacheAdmin(
            lambda work: loop.run(lambda: work(self._workload.prefix_cache)),
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

    @property
    def refused(self) -> int:
        return self._workload.refused

    @property
    def last_step(self) -> int:
        """The number of the last forward pass that other ranks were told of; 0 where there are none."""
        return self._loaded.adapter.last_step

    @property
    def ranks_trouble(self) -> str:
        """Why other ranks cannot be told anything any more; empty while they can, and where there are none."""
        return self._loaded.adapter.ranks_trouble

    def memory(self) -> tuple[int, int]:
        """Bytes that exist for KV, and those of them that running sequences and cached prefixes hold."""
        return self._loop.run(lambda: self._workload.memory)

    @property
    def figures(self) -> EngineMetrics:
        """What was done since the start, and how full the engine is; any thread may read it."""
        return self._workload.figures

    @property
    def speculation(self) -> SpeculationMetrics:
        """What speculation did; any thread may read it."""
        return self._workload.speculation

    def _accept(self, request: Request, reader: EventSink) -> None:
        self._loop.refuse_if_stopped()
        self._workload.enter(request, reader)


def release_unused_memory() -> int:
    """Free unreferenced objects and mlx's cache; returns the bytes that are left. For the engine's thread."""
    gc.collect()
    # Modules initialise random weights, which are never evaluated; the random state would refer to all of these draws.
    mx.eval(mx.random.state)
    mx.synchronize()
    if native.available():  # the native kernels release the last weights they used at the next call
        native.linear(mx.zeros((1, 1)), native.plain_weights(mx.zeros((1, 1)), None))
    mx.clear_cache()
    return mx.get_active_memory()
