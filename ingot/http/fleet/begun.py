"""A stream that begins before its model is there: its head and signs of life go out while the model is loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct
from starlette.types import Message, Send

from ingot.config import Settings
from ingot.errors import IngotError
from ingot.http.edge import Reply
from ingot.http.request_lifetime import beside
from ingot.http.streaming import StreamedResponse
from ingot.http.streaming_framing import Framing
from ingot.http.streaming_ndjson import LINES
from ingot.http.streaming_sse import BARE_EVENTS, KEEP_ALIVE, MEDIA_TYPE
from ingot.protocol.errors import error_body


class Fault(Struct, tag_field="type", tag="error", kw_only=True):
    """The event by which a stream of `/v1/responses` ends that never became one."""

    code: str
    message: str
    param: str | None
    sequence_number: int = 0


def _event(buffer: bytearray, chunk: Struct) -> None:
    buffer += b"event: error\ndata: "
    buffer += msgspec.json.encode(chunk)
    buffer += b"\n\n"


NAMED = Framing(MEDIA_TYPE, _event, alive=KEEP_ALIVE)


def framing_of(path: str) -> Framing:
    if path.startswith("/api/"):
        return LINES
    return NAMED if path.startswith(("/v1/messages", "/v1/responses")) else BARE_EVENTS


class BegunStream:
    """What an endpoint is given to send by, once the head is out: it says the head again, which goes nowhere."""

    def __init__(self, answer: Reply, send: Send, settings: Settings) -> None:
        self._answer, self._send = answer, send
        self._out = StreamedResponse(send, framing_of(answer.scope["path"]), settings)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """The head goes out, and signs of life for as long as the block lasts."""
        await self._out.start()
        async with beside(self._out.keep_alive(list)):
            yield

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.start":
            await self._send(message)

    async def fail(self, error: IngotError) -> None:
        """The stream ends in words, as its protocol has them."""
        path = self._answer.scope["path"]
        body: Struct = error_body(error, path, self._answer.id)
        if path.startswith("/v1/responses"):
            body = Fault(code=error.code or "", message=error.message, param=error.param)
        await self._out.end(self._out.framing.framed([body]))
