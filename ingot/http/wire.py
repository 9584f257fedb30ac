"""HTTP/1.1 on the socket: uvicorn's httptools protocol with a bound on the head of a request.

The parser below takes a head of any size at any pace, so both are watched here, where the bytes come in.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ingot.errors import BadRequest, HeadTooLarge, IngotError
from ingot.protocol.errors import ErrorBody

HEAD_S: Final = 30.0  # from the first byte of a connection, or of the next request on it, to the end of the head


class BoundedHttp(HttpToolsProtocol):
    max_head_bytes: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._unfinished = 0
        self._patience: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []

    @classmethod
    def with_limit(cls, max_head_bytes: int) -> type[BoundedHttp]:
        return type(cls.__name__, (cls,), {"max_head_bytes": max_head_bytes})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        # The parent tells only the newest request of a pipeline that its client has gone.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            # The parser keeps a header to itself until it is whole, so what it holds is counted here.
            self._unfinished += len(data)
            if self._unfinished > self.max_head_bytes and not self.transport.is_closing():
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._unfinished = True, 0, 0
        if self._patience is None:
            self._expect_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._in_head = False
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self.cycle is not None:
            self._cycles.append(self.cycle)

    def send_400_response(self, msg: str) -> None:
        """What the parser could not take: ours if it was too long, else no HTTP at all."""
        if self._head_bytes > self.max_head_bytes:
            self._refuse_head()
        else:
            self._refuse(BadRequest("This is not a valid HTTP request."))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_head_bytes:
            raise ValueError("the head is too large")  # stops the parser, which then calls send_400_response

    def _expect_head(self) -> None:
        self._patience = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse_head(self) -> None:
        self._refuse(HeadTooLarge(f"The head of a request may have {self.max_head_bytes} bytes."))

    def _refuse(self, error: IngotError) -> None:
        body = msgspec.json.encode(ErrorBody.of(error))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
