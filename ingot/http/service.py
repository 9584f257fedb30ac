"""What the endpoints share: the engine, what it serves, the requests under way, and the threads that read bodies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio.to_thread
from starlette.types import Receive

from ingot.config import Settings
from ingot.errors import IngotError
from ingot.http.body import Bodies, decode
from ingot.http.capture import Captures
from ingot.http.disconnect import Exchange, Live
from ingot.http.lanes import Lane
from ingot.http.rates import Rates
from ingot.http.responses.store import store_of
from ingot.http.tenants import Tenants
from ingot.mcp.config import read_servers
from ingot.mcp.servers import McpServers
from ingot.media import fetched
from ingot.observe.recent import Recent
from ingot.protocol.ours.requests import RequestBody
from ingot.protocol.served import Served
from ingot.text.grammar import limits
from ingot.text.grammar.compiled import CompiledGrammar
from ingot.text.grammar.grammars import Uncompiled, prepared
from ingot.text.prompt.answer_file import AnswerFile, answers_path
from ingot.text.prompt.remembered import RememberedAnswers

if TYPE_CHECKING:
    from ingot.engine.engine import Engine

T = TypeVar("T")
LONG_BODY: Final = 512 * 1024
"""Bytes of a body that takes long to read, for which there are threads of their own: others overtake it."""


class Service:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.served = Served.of(engine.card, engine.tokenizer, settings, engine.encoders, engine.processor)
        self.response_store = store_of(settings)
        if self.response_store is not None:
            self.served = replace(self.served, secret=self.response_store.secret)
        self._answers = None
        if settings.cache_dir is not None:
            self._answers = AnswerFile(answers_path(settings.cache_dir, engine.tokenizer))
            self.served = replace(self.served, answers=RememberedAnswers(journal=self._answers))
        self.mcp = None if settings.mcp_config is None else McpServers(read_servers(settings.mcp_config))
        self.tenants, self.rates = Tenants(settings), Rates()
        self.bodies = Bodies(settings.held_bytes)
        self.live = Live()
        self.captures = None if settings.capture is None else Captures(settings.capture, self.served, settings)
        self.statuses: Counter[int] = Counter()  # of all answers so far
        self.ended: Recent[RequestBody] = Recent()
        self._readers = Lane("read", threads=8, each=6, waiting=256)
        self._long_readers = Lane("read-long", threads=2, each=2, waiting=16)
        self._fetchers = Lane("fetch", threads=8, each=4, waiting=64)
        self._compilers = Lane("compile", threads=limits.COMPILERS, each=1, waiting=limits.WAITING)

    async def start(self) -> None:
        """What needs the event loop or takes a while, before requests come. Raises ConfigError."""
        await anyio.to_thread.run_sync(self.served.grammars.prepare)
        if self.mcp is not None:
            await self.mcp.start()

    async def stop(self) -> None:
        for lane in (self._readers, self._long_readers, self._fetchers, self._compilers):
            lane.close()
        self.served.grammars.close()
        if self.captures is not None:
            await anyio.to_thread.run_sync(self.captures.close)
        if self._answers is not None:
            await anyio.to_thread.run_sync(self._answers.close)
        if self.mcp is not None:
            await self.mcp.stop()

    def served_to(self, tenant: str) -> Served:
        """What is served, as this tenant meets it."""
        return replace(self.served, tenant=tenant) if tenant else self.served

    async def read(self, raw: bytes, translate: Callable[[Any], T], tenant: str) -> T:
        """`translate` of the decoded body, in a thread: rendering and tokenizing would hold up every stream.

        Raises Overloaded where too many of this tenant's wait for that already.
        """

        def read() -> T:
            return translate(decode(raw, self.settings.max_json_depth))

        return await self.prepare(read, tenant, self._long_readers if len(raw) > LONG_BODY else self._readers)

    async def prepare(self, work: Callable[[], T], tenant: str, lane: Lane | None = None) -> T:
        """What `work` gives, in a thread of the lane's; the grammars that it needs are compiled elsewhere before, and
        files that have to be fetched are."""
        ready: dict[bytes, CompiledGrammar | str] = {}
        files: dict[str, bytes | IngotError] = {}

        def prepared_work() -> T:
            prepared.set(ready)
            fetched.ready.set(files)
            return work()

        while True:
            try:
                return await (lane or self._readers).run(tenant, prepared_work)
            except Uncompiled as missing:
                ready[missing.key] = await self._compilers.run(tenant, missing.compile)
            except fetched.Unfetched as missing:
                files[missing.url] = await self._fetchers.run(tenant, missing.fetch)

    async def attended(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` gives, as long as the client is there."""
        made: list[T] = []

        async def answer() -> None:
            made.append(await work())

        await self.live.run(Exchange(receive, self.settings.request_timeout_s), answer)
        return made[0]
