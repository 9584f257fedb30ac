"""What all models of a server share: its settings, who may come in, the requests in progress, the threads that read
bodies, stored responses and tools. A lane is a thread pool for one kind of work that would block the event loop, shared
fairly by tenants. Light to import; for the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.types import Receive

from ingot.config import Settings
from ingot.distributed.heartbeat import RankStatus, first_rank_problem, rank_not_ready
from ingot.engine.speech_request import TranscribedText, UntranscribedAudio, cached_transcripts
from ingot.engine.status import Health
from ingot.errors import IngotError, Overloaded, Unavailable
from ingot.http.body import RequestBodies, decode_json
from ingot.http.request_lifetime import LiveRequests, RequestLifetime
from ingot.http.response_store import ResponseRuns, open_response_store
from ingot.http.tenants import RateLimits, Tenants
from ingot.media import fetch, worker
from ingot.observe.logs import current_request_id
from ingot.observe.metrics import RecentByTenant, RequestTimeline
from ingot.shares import Shares, SharesPerSecond
from ingot.text import cancellation
from ingot.text.cancellation import is_wanted
from ingot.text.grammar import limits
from ingot.text.grammar.pending import GrammarPending, prepared_grammars

if TYPE_CHECKING:
    from ingot.mcp.servers import McpServers
    from ingot.protocol.ingot_api.requests import RequestStatusBody
    from ingot.text.grammar.compiled import LlguidanceGrammar


@dataclass(frozen=True, slots=True)
class LeasedModel:
    """A model of the server that requests of others may use."""

    name: str
    names: tuple[str, ...]
    lease: Callable[[], AbstractAsyncContextManager[tuple[Any, Any]]]  # its service and its endpoints


T = TypeVar("T")
TranscribeAudio = Callable[[UntranscribedAudio, str], Awaitable[TranscribedText]]
LONG_BODY_BYTES: Final = 512 * 1024
"""Bytes of a body that takes long to read, for which there are threads of their own: others overtake it."""
UNKNOWN_A_SECOND: Final = 200
"""Requests without a key: a page is about sixty of them."""
PROBES_A_SECOND: Final = 100
RANK_BEHIND_S: Final = 5.0
"""A process that is behind for so long makes the server's health bad, before all are given up."""


class SharedState:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.response_store = open_response_store(settings)
        self.mcp = None if settings.mcp_config is None else connect_mcp_servers(settings.mcp_config)
        self.tenants, self.rates = Tenants(settings), RateLimits()
        self.unknown = SharesPerSecond("requests without a key", UNKNOWN_A_SECOND)
        self.probes = SharesPerSecond("probes", PROBES_A_SECOND)
        self.bodies = RequestBodies(settings.held_bytes)
        self.live = LiveRequests()
        self.runs: ResponseRuns[Any] = ResponseRuns()
        self.statuses: Counter[int] = Counter()  # of all answers so far
        self.served_names: Callable[[], Sequence[str]] = tuple
        """Of all models and adapters that are loaded."""
        self.speech_to_text: LeasedModel | None = None
        """What transcribes audio in messages, where there is such a model."""
        self.ended: RecentByTenant[RequestStatusBody] = RecentByTenant()
        self.past = RequestTimeline()
        self.rank_statuses: Callable[[], Sequence[RankStatus]] = tuple
        """Of the processes that run the model, where there are several."""
        self._readers = ThreadLane("read", threads=8, each=6, waiting=256)
        self._long_readers = ThreadLane("read-long", threads=3, each=2, waiting=16)
        self._fetchers = ThreadLane("fetch", threads=8, each=4, waiting=64)
        self._compilers = ThreadLane(
            "compile", threads=limits.COMPILER_PROCESSES, each=1, waiting=limits.MOST_WAITING_REQUESTS
        )

    async def start(self) -> None:
        """What needs the event loop, before requests come. Raises ConfigError."""
        if self.mcp is not None:
            await self.mcp.start()

    async def stop(self) -> None:
        for lane in (self._readers, self._long_readers, self._fetchers, self._compilers):
            lane.close()
        if self.mcp is not None:
            await self.mcp.stop()

    def health(self, engine: Health) -> Health:
        """An engine's, whether all its processes advance, and whether the server still lets anybody in."""
        if self.live.draining:
            return replace(engine, ready=False, detail="draining" if engine.alive else engine.detail)
        rank_statuses = self.rank_statuses()
        problem = first_rank_problem(rank_statuses, RANK_BEHIND_S) or rank_not_ready(rank_statuses)
        if problem is not None:
            engine = replace(engine, ready=False, detail=problem)
        return replace(engine, ranks=tuple(rank_statuses))

    async def read(
        self, raw: bytes, translate: Callable[[Any], T], tenant: str, transcribe: TranscribeAudio | None = None
    ) -> T:
        """`translate` of the decoded body, in a thread: rendering and tokenizing would hold up every stream.

        Raises Overloaded where too many of this tenant's wait for that already.
        """

        def read() -> T:
            return translate(decode_json(raw, self.settings.max_json_depth))

        return await self.prepare(
            read, tenant, self._long_readers if len(raw) > LONG_BODY_BYTES else self._readers, transcribe
        )

    async def prepare_slow(self, work: Callable[[], T], tenant: str) -> T:
        """The same, of `work` that takes long whatever it reads."""
        return await self.prepare(work, tenant, self._long_readers)

    async def prepare(
        self,
        work: Callable[[], T],
        tenant: str,
        lane: ThreadLane | None = None,
        transcribe: TranscribeAudio | None = None,
    ) -> T:
        """What `work` gives, in a thread of the lane's; the grammars that it needs are compiled elsewhere before, files
        that have to be fetched are, and audio is transcribed."""
        ready: dict[bytes, LlguidanceGrammar | str] = {}
        files: dict[str, bytes | IngotError] = {}
        transcripts: dict[bytes, TranscribedText] = {}

        def prepared_work() -> T:
            prepared_grammars.set(ready)
            cached_transcripts.set(None if transcribe is None else transcripts)
            fetch.prefetched_files.set(files)
            return work()

        while True:
            try:
                return await (lane or self._readers).run(tenant, prepared_work)
            except GrammarPending as missing:
                ready[missing.key] = await self._compiled(missing, tenant)
            except fetch.Unfetched as missing:
                files[missing.url] = await self._fetchers.run(tenant, partial(missing.fetch, is_wanted))
            except UntranscribedAudio as missing:
                assert transcribe is not None, "reading refuses audio that nothing can transcribe"
                transcripts[missing.digest] = await transcribe(missing, tenant)

    async def _compiled(self, missing: GrammarPending, tenant: str) -> LlguidanceGrammar | str:
        try:
            return await self._compilers.run(tenant, missing.compile)
        except (Overloaded, Unavailable) as error:
            if not missing.optional:
                raise
            return str(error)

    async def attended(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` gives, as long as the client is there."""
        made: list[T] = []

        async def answer() -> None:
            made.append(await work())

        await self.live.run(RequestLifetime(receive, self.settings.request_timeout_s), answer)
        return made[0]


def connect_mcp_servers(file: Path) -> McpServers:
    """Raises ConfigError. Few servers have any: what speaks to them is imported for those."""
    from ingot.mcp.config import read_mcp_servers
    from ingot.mcp.servers import McpServers

    return McpServers(read_mcp_servers(file))


LANE_RETRY_S: Final = 1.0


class FairTurns:
    """A fair semaphore of one event loop: `at_once` may run, at most `each` of one tenant, and tenants take turns.
    Where `waiting` of a tenant wait already, more raise Overloaded."""

    def __init__(self, name: str, *, at_once: int, each: int, waiting: int) -> None:
        self._each, self._waiting = each, waiting
        self._running = Shares(name, at_once)
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        await self.take(tenant)
        try:
            yield
        finally:
            self.leave(tenant)

    async def take(self, tenant: str) -> None:
        """Waits for a turn, which the caller has until it calls `leave`."""
        queue = self._queues.get(tenant)
        if not queue and self._has_room(tenant):
            self._running.add(tenant, 1)
            return
        if queue is None:
            queue = self._queues[tenant] = deque()
        if len(queue) >= self._waiting:
            raise Overloaded(
                f"{len(queue)} requests of this key are waiting already. Try again in a moment.",
                retry_after=LANE_RETRY_S,
            )
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came just when its caller left
                self.leave(tenant)
            elif turn in queue:
                queue.remove(turn)
            raise

    def leave(self, tenant: str) -> None:
        self._running.add(tenant, -1)
        while (following := self._next()) is not None:
            turn = self._queues[following].popleft()
            if not turn.cancelled():
                self._running.add(following, 1)
                turn.set_result(None)
                self._queues.move_to_end(following)
        self._queues = OrderedDict((tenant, queue) for tenant, queue in self._queues.items() if queue)

    def _has_room(self, tenant: str) -> bool:
        return self._running.total < self._running.capacity and self._running.held[tenant] < self._each

    def _next(self) -> str | None:
        """Whose turn it is: of the tenants that may run, the one with fewest running; then the one that waited
        longest."""
        waiting = (tenant for tenant, queue in self._queues.items() if queue and self._has_room(tenant))
        return min(waiting, key=lambda tenant: self._running.held[tenant], default=None)


class ThreadLane:
    """Threads that tenants use by turns.

    Work whose caller is cancelled can see that (`cancellation.still_wanted`) and keeps its thread until it stops.
    """

    def __init__(self, name: str, *, threads: int, each: int, waiting: int) -> None:
        self._turns = FairTurns(name, at_once=threads, each=each, waiting=waiting)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"ingot-{name}")

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        await self._turns.take(tenant)
        left = threading.Event()

        def wanted() -> bool:
            return not left.is_set()

        def watched() -> T:
            cancellation.still_wanted.set(wanted)
            with worker.working_for(worker.MediaClient(tenant, wanted, current_request_id.get())):
                return work()

        loop = asyncio.get_running_loop()
        made = self._executor.submit(contextvars.copy_context().run, watched)
        made.add_done_callback(lambda _: self._ended(loop, tenant))
        try:
            return await asyncio.wrap_future(made)
        except asyncio.CancelledError:
            left.set()
            raise

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _ended(self, loop: asyncio.AbstractEventLoop, tenant: str) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(self._turns.leave, tenant)
