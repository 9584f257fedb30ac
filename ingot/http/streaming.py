"""A streamed response: headers at once, frames as they come, and a sign of life when there is nothing to say."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from ingot.http.framing import Framing


class StreamedResponse:
    """`keep_alive` runs beside whoever calls `write`; it stays silent while a write waits."""

    def __init__(self, send: Send, framing: Framing, keepalive_s: float) -> None:
        self._send = send
        self.framing = framing
        self._keepalive_s = keepalive_s
        self._clock = asyncio.get_running_loop().time
        self._spoke = self._clock()
        self._writing = False
        self.started = False

    async def start(self) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": self.framing.headers})

    async def write(self, frames: bytes) -> None:
        if not frames:
            return
        self._writing = True
        try:
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})
        finally:
            self._writing = False
        self._spoke = self._clock()

    async def keep_alive(self) -> None:
        while True:
            silence = self._clock() - self._spoke
            if silence >= self._keepalive_s and not self._writing:
                await self.write(self.framing.alive)
                silence = 0.0
            await asyncio.sleep(max(self._keepalive_s - silence, self._keepalive_s / 10))

    async def end(self, frames: bytes) -> None:
        await self._send({"type": "http.response.body", "body": frames})
