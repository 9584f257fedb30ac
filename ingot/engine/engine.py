"""The engine as other threads see it: requests in, streams of events and vectors out.

Any thread may call it. Plain values go through a mailbox to the loop's thread, the only one that touches mlx, and plain
values come back.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ingot.engine.door import Limits
from ingot.engine.encoder_batches import OfferedEncoder
from ingot.engine.encoder_jobs import EncoderJobs
from ingot.engine.encoder_request import Encoded, EncodingRequest, Role
from ingot.engine.generation import Generation
from ingot.engine.kept_prefixes import KeptPrefixes
from ingot.engine.loaded import Loaded
from ingot.engine.loop import Loop, Workload
from ingot.engine.request import Health, ModelCard, Request, RequestStatus
from ingot.engine.runner import leave_device
from ingot.engine.stream import BlockingStream, EventSink, Stream
from ingot.errors import Cancelled, ClientLeft
from ingot.media.processor import Processor
from ingot.observe.figures import Figures
from ingot.observe.speculation import SpeculationCounts
from ingot.text.tokens.tokenizer import Tokenizer

__all__ = ["Engine", "Limits", "Loaded", "Stream"]


class Engine:
    """Started by the constructor, which returns when the model is loaded or raises what went wrong."""

    def __init__(self, load: Callable[[], Loaded], limits: Limits) -> None:
        self._load, self._limits = load, limits
        self._loop = Loop("ingot-engine", self._workloads)
        self._loop.start()

    def _workloads(self) -> Sequence[Workload]:
        """Made on the loop's thread. Answers come first: what encoders may take of a turn depends on what is left."""
        try:
            loaded = self._loaded = self._load()
            if loaded.disk is not None:
                loaded.disk.writer.wrote = self._loop.wake
            self._generation = Generation(
                loaded, self._limits, lambda letter: self._loop.post(self._generation, letter)
            )
            self._encodings = EncoderJobs(
                loaded.encoders,
                lambda letter: self._loop.post(self._encodings, letter),
                self._limits.max_queue,
                self._limits.target_itl_ms,
            )
        except BaseException:
            leave_device()
            raise
        return self._generation, self._encodings

    @property
    def card(self) -> ModelCard:
        return self._loaded.card

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def encoders(self) -> Mapping[Role, OfferedEncoder]:
        return self._loaded.encoders

    @property
    def processor(self) -> Processor | None:
        """How the model is shown pictures and clips; None: it has no vision tower."""
        return self._loaded.processor

    @property
    def kept(self) -> KeptPrefixes:
        """The prefixes that are kept."""
        loaded, loop = self._loaded, self._loop
        return KeptPrefixes(
            lambda work: loop.run(lambda: work(self._generation.reuse)),
            loaded.adapter,
            loaded.folder,
            loaded.disk,
            loaded.codec,
        )

    async def open(self, request: Request) -> Stream:
        """Accept a request from a coroutine. Raises at once what can be known at once.

        A long prompt takes a while to look at, which must not hold up the loop.
        """
        stream = Stream(lambda: self._cancel(request.id, ClientLeft("The client left")))
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

    async def encode(self, request: EncodingRequest) -> Encoded:
        """Vectors or scores of texts. Raises before any work what can be known then; a cancelled wait ends the work."""
        self._loop.refuse_if_stopped()
        return await self._encodings.encode(request)

    def cancel(self, request_id: str) -> bool:
        """End a request, wherever it is. False if there is none of that id."""
        return self._cancel(request_id, Cancelled("The request was cancelled"))

    def status(self) -> list[RequestStatus]:
        now = time.monotonic()
        return [*self._generation.status(now), *self._encodings.status(now)]

    def health(self) -> Health:
        pulse = self._loop.pulse()
        phases = [status.phase for status in self.status()]
        running = sum(phase != "queued" for phase in phases)
        waiting, refused = len(phases) - running, self._generation.refused
        return Health(pulse.alive, pulse.ready, pulse.detail, pulse.beat_ago_s, running, waiting, refused)

    def check(self) -> None:
        """Run the integrity check on the engine thread and wait for it; raises what it finds."""
        self._loop.check()

    def memory(self) -> tuple[int, int]:
        """Bytes that exist for states, and those of them that running sequences and kept prefixes hold."""
        return self._loop.run(lambda: self._generation.memory)

    @property
    def figures(self) -> Figures:
        """What was done since the start, and how full the engine is; any thread may read it."""
        return self._generation.figures

    @property
    def speculation(self) -> SpeculationCounts:
        """What guessing ahead did; any thread may read it."""
        return self._generation.speculation

    def close(self) -> None:
        """Cancel what runs and end the thread. A process that leaves without it does it on its way out."""
        self._loop.close()

    def _accept(self, request: Request, reader: EventSink) -> None:
        self._loop.refuse_if_stopped()
        self._generation.enter(request, reader)

    def _cancel(self, request_id: str, cause: Cancelled) -> bool:
        return self._generation.cancel(request_id, cause) or self._encodings.cancel(request_id)
