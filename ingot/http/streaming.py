"""Responses that take their time. A streamed one: headers at once, frames as they come, and a sign of life when there
is nothing to say. A whole one: white space before its JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct
from starlette.types import Message, Send

from ingot.config import Settings
from ingot.errors import IngotError
from ingot.http.edge import Reply
from ingot.http.request_lifetime import beside
from ingot.http.streaming_framing import Framing
from ingot.protocol.errors import error_body


class StreamedResponse:
    """`keep_alive` runs beside whoever calls `write`; it stays silent while a write waits."""

    def __init__(self, send: Send, framing: Framing, settings: Settings) -> None:
        self._send = send
        self.framing = framing
        self._keepalive_s, self._event_s = settings.keepalive_s, settings.idle_event_s
        self._clock = asyncio.get_running_loop().time
        self._spoke = self._told = 0.0
        self._writing = False
        self.started = False

    async def start(self) -> None:
        self.started = True
        self._spoke = self._told = self._clock()
        await self._send({"type": "http.response.start", "status": 200, "headers": self.framing.headers})

    async def write(self, frames: bytes) -> None:
        """Events, if there are any."""
        if frames:
            await self._write(frames)
            self._told = self._spoke

    async def keep_alive(self, empty: Callable[[], list[Struct]]) -> None:
        """Fills a silence: with what holds a connection open, and less often with events that say nothing, as some
        clients count nothing else."""
        while True:
            now = self._clock()
            if self._writing:
                pass
            elif now - self._told >= self._event_s:
                self._told = now
                await self.write(self.framing.framed(empty()))
            elif now - self._spoke >= self._keepalive_s:
                await self._write(self.framing.alive)
            await asyncio.sleep(self._until_next())

    async def end(self, frames: bytes) -> None:
        await self._send({"type": "http.response.body", "body": frames})

    async def _write(self, frames: bytes) -> None:
        self._writing = True
        try:
            if frames:
                await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        finally:
            self._writing = False
        self._spoke = self._clock()

    def _until_next(self) -> float:
        now = self._clock()
        left = min(self._spoke + self._keepalive_s - now, self._told + self._event_s - now)
        return max(left, min(self._keepalive_s, self._event_s) / 10)


class HeldResponse:
    """One JSON body. Clients and proxies give up where nothing comes for minutes, so a body that is long in the making
    begins with white space, which JSON allows. By then its status is 200, whatever comes of it: an error that comes
    later is told in the body, in the shape that the protocol has for errors.

    `send` is what the response is sent by, once it is there: its head goes out only where none has.
    """

    def __init__(self, answer: Reply, send: Send, settings: Settings) -> None:
        self._answer, self._send, self._every_s = answer, send, settings.idle_body_s
        self.begun = False

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """White space goes out for as long as the block lasts."""
        async with beside(self._hold()):
            yield

    async def send(self, message: Message) -> None:
        if not self.begun or message["type"] != "http.response.start":
            await self._send(message)

    async def fail(self, error: IngotError) -> None:
        body = error_body(error, self._answer.scope["path"], self._answer.id)
        await self._send({"type": "http.response.body", "body": msgspec.json.encode(body)})

    async def _hold(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            if not self.begun:
                self.begun = True
                headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-cache")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": b" ", "more_body": True})
