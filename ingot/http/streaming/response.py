"""A streamed response: headers at once, frames as they come, and a sign of life when there is nothing to say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import Struct
from starlette.types import Send

from ingot.config import Settings
from ingot.http.streaming.framing import Framing


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
