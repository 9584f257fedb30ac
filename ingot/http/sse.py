"""Server-sent events: framing, headers at once, and a sign of life when there is nothing to say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct
from starlette.types import Send

from ingot.errors import IngotError
from ingot.protocol.errors import ErrorBody

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
encoder = msgspec.json.Encoder()


def framed(chunks: Iterable[Struct]) -> bytes:
    buffer = bytearray()
    for chunk in chunks:
        buffer += b"data: "
        encoder.encode_into(chunk, buffer, -1)
        buffer += b"\n\n"
    return bytes(buffer)


class EventStream:
    """One response. `keep_alive` runs beside whoever calls `write`; it stays silent while a write waits."""

    def __init__(self, send: Send, keepalive_s: float) -> None:
        self._send = send
        self._keepalive_s = keepalive_s
        self._clock = asyncio.get_running_loop().time
        self._spoke = self._clock()
        self._writing = False
        self.started = False

    async def start(self) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

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
                await self.write(KEEP_ALIVE)
                silence = 0.0
            await asyncio.sleep(max(self._keepalive_s - silence, self._keepalive_s / 10))

    async def end(self, frames: bytes) -> None:
        await self._send({"type": "http.response.body", "body": frames})

    async def fail(self, error: IngotError) -> None:
        """The last words of a stream that broke: an error instead of `[DONE]`, which clients raise."""
        await self.end(framed([ErrorBody.of(error)]))
