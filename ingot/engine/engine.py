"""The engine of a model that generates, as other threads see it: requests in, streams of events out.

What holds for all engines, and what serves beside answers, is in `side_engine`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ingot.engine.admission import Limits
from ingot.engine.cache_admin import KeptPrefixes
from ingot.engine.core import Generation
from ingot.engine.loaded import Loaded
from ingot.engine.loop import Loop, Workload
from ingot.engine.loras import NamedLoras
from ingot.engine.model_card import ModelCard
from ingot.engine.request import LoraRef, Request, RequestStatus
from ingot.engine.side_engine import SideEngine
from ingot.engine.streams import BlockingStream, EventSink, Stream
from ingot.errors import ClientLeft, IngotError, Unsupported
from ingot.media.processor import Processor
from ingot.observe.metrics import Figures
from ingot.observe.speculation import SpeculationCounts
from ingot.text.tokenizer.tokenizer import Tokenizer


class Engine(SideEngine):
    """Of a model that generates, and of those that serve beside it."""

    _loaded: Loaded

    def __init__(self, load: Callable[[], Loaded], limits: Limits, loop: Loop | None = None) -> None:
        super().__init__(load, limits, loop)

    def _begun(self) -> Sequence[Workload]:
        """Answers come first: what others may take of a turn depends on what is left."""
        loaded = self._loaded
        if loaded.disk is not None:
            loaded.disk.writer.wrote = self._loop.wake
        self._generation = Generation(loaded, self._limits, lambda letter: self._loop.post(self._generation, letter))
        return self._generation, *super()._begun()

    @property
    def card(self) -> ModelCard:
        return self._loaded.card

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def processor(self) -> Processor | None:
        """How the model is shown pictures and clips; None: it has no vision tower."""
        return self._loaded.processor

    @property
    def loras(self) -> Mapping[str, LoraRef]:
        """The adapters that may be asked for, by name."""
        return {} if self._loaded.loras is None else self._loaded.loras.named

    def load_lora(self, name: str, folder: Path) -> LoraRef:
        """Serve an adapter from now on. Raises AdapterError."""
        loras = self._named_loras()
        return self._loop.run(lambda: loras.load(name, folder))

    def unload_lora(self, name: str) -> None:
        """Those that run with it go on. Raises ModelNotFound."""
        loras = self._named_loras()
        self._loop.run(lambda: loras.unload(name))

    def _named_loras(self) -> NamedLoras:
        if self._loaded.loras is None:
            raise Unsupported("This server was started without adapters.")
        return self._loaded.loras

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
        stream = Stream(partial(self._cancel, request.id))
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
    def figures(self) -> Figures:
        """What was done since the start, and how full the engine is; any thread may read it."""
        return self._generation.figures

    @property
    def speculation(self) -> SpeculationCounts:
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
