"""What all models of a server share: its settings, who may come in, the requests under way, the threads that read
bodies, stored responses and tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from starlette.types import Receive

from ingot.config import Settings
from ingot.distributed.heartbeat import Standing, first_problem, not_ready
from ingot.engine.health import Health
from ingot.engine.speech_request import Transcript, Untranscribed, transcripts
from ingot.errors import IngotError, Overloaded, Unavailable
from ingot.http.body import Bodies, decode
from ingot.http.lanes import Lane
from ingot.http.rates import Rates
from ingot.http.request_lifetime import Exchange, Live
from ingot.http.response_store import store_of
from ingot.http.responses.under_way import Runs
from ingot.http.tenants import Tenants
from ingot.media import fetched
from ingot.observe.recent import Recent
from ingot.observe.recent_requests import Timeline
from ingot.shares import PerSecond
from ingot.text.cancellation import wanted
from ingot.text.grammar import limits
from ingot.text.grammar.pending import Uncompiled, prepared

if TYPE_CHECKING:
    from ingot.mcp.servers import McpServers
    from ingot.protocol.ours.requests import RequestBody
    from ingot.text.grammar.compiled import CompiledGrammar

T = TypeVar("T")
Hear = Callable[[Untranscribed, str], Awaitable[Transcript]]
LONG_BODY: Final = 512 * 1024
"""Bytes of a body that takes long to read, for which there are threads of their own: others overtake it."""
UNKNOWN_A_SECOND: Final = 200
"""Requests without a key: a page is about sixty of them."""
PROBES_A_SECOND: Final = 100
BEHIND_S: Final = 5.0
"""A process that is behind for so long makes the server's health bad, before all are given up."""


class HasHall(Protocol):
    """One model, or several."""

    @property
    def hall(self) -> Hall: ...


class Hall:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.response_store = store_of(settings)
        self.mcp = None if settings.mcp_config is None else mcp_servers(settings.mcp_config)
        self.tenants, self.rates = Tenants(settings), Rates()
        self.unknown = PerSecond("requests without a key", UNKNOWN_A_SECOND)
        self.probes = PerSecond("probes", PROBES_A_SECOND)
        self.bodies = Bodies(settings.held_bytes)
        self.live = Live()
        self.runs: Runs[Any] = Runs()
        self.statuses: Counter[int] = Counter()  # of all answers so far
        self.ended: Recent[RequestBody] = Recent()
        self.past = Timeline()
        self.standings: Callable[[], Sequence[Standing]] = tuple
        """How the processes stand that the model runs on, where there are several."""
        self._readers = Lane("read", threads=8, each=6, waiting=256)
        self._long_readers = Lane("read-long", threads=3, each=2, waiting=16)
        self._fetchers = Lane("fetch", threads=8, each=4, waiting=64)
        self._compilers = Lane("compile", threads=limits.COMPILERS, each=1, waiting=limits.WAITING)

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
        standings = self.standings()
        problem = first_problem(standings, BEHIND_S) or not_ready(standings)
        if problem is not None:
            engine = replace(engine, ready=False, detail=problem)
        return replace(engine, ranks=tuple(standings))

    async def read(self, raw: bytes, translate: Callable[[Any], T], tenant: str, hear: Hear | None = None) -> T:
        """`translate` of the decoded body, in a thread: rendering and tokenizing would hold up every stream.

        Raises Overloaded where too many of this tenant's wait for that already.
        """

        def read() -> T:
            return translate(decode(raw, self.settings.max_json_depth))

        return await self.prepare(read, tenant, self._long_readers if len(raw) > LONG_BODY else self._readers, hear)

    async def prepare_long(self, work: Callable[[], T], tenant: str) -> T:
        """The same, of `work` that takes long whatever it reads."""
        return await self.prepare(work, tenant, self._long_readers)

    async def prepare(
        self, work: Callable[[], T], tenant: str, lane: Lane | None = None, hear: Hear | None = None
    ) -> T:
        """What `work` gives, in a thread of the lane's; the grammars that it needs are compiled elsewhere before, files
        that have to be fetched are, and sounds that stand for text are heard."""
        ready: dict[bytes, CompiledGrammar | str] = {}
        files: dict[str, bytes | IngotError] = {}
        heard: dict[bytes, Transcript] = {}

        def prepared_work() -> T:
            prepared.set(ready)
            transcripts.set(None if hear is None else heard)
            fetched.ready.set(files)
            return work()

        while True:
            try:
                return await (lane or self._readers).run(tenant, prepared_work)
            except Uncompiled as missing:
                ready[missing.key] = await self._compiled(missing, tenant)
            except fetched.Unfetched as missing:
                files[missing.url] = await self._fetchers.run(tenant, partial(missing.fetch, wanted))
            except Untranscribed as missing:
                assert hear is not None, "reading refuses sounds where nobody hears"
                heard[missing.digest] = await hear(missing, tenant)

    async def _compiled(self, missing: Uncompiled, tenant: str) -> CompiledGrammar | str:
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

        await self.live.run(Exchange(receive, self.settings.request_timeout_s), answer)
        return made[0]


def mcp_servers(file: Path) -> McpServers:
    """Raises ConfigError. Few servers have any: what speaks to them is imported for those."""
    from ingot.mcp.config import read_servers
    from ingot.mcp.servers import McpServers

    return McpServers(read_servers(file))
