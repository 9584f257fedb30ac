"""HTTP/1.1 on the socket: uvicorn's httptools protocol with bounds on what a client may hold without using it.

The parser accepts headers of any size at any pace, so both are checked here, where the bytes arrive; and so is whether
the client reads its answer, which would otherwise be held for ever. `server_config` is uvicorn's configuration with
these bounds.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ingot.config import Settings
from ingot.errors import BadRequest, HeadersTooLarge, IngotError, Unavailable
from ingot.http.connections import OpenConnections, affordable_connections, client_address, set_keepalive_options
from ingot.observe.logs import RareWarning
from ingot.protocol.errors import ErrorBody, retry_after

log = logging.getLogger("ingot.http")

HEAD_TIMEOUT_S: Final = 30.0  # from the first byte of a connection, or of its next request, to the end of the headers
WAITING_HEAD_TIMEOUT_S: Final = 5.0  # the same, for a connection above the limit
STALLED_BODY_S: Final = 5.0  # without a byte of a body, after which its connection may be closed for another one
UNREAD_ANSWER_S: Final = 60.0  # that a client may read nothing of its answer
unread_notice = RareWarning(log)


class BoundedHttp(HttpToolsProtocol):
    max_head_bytes: ClassVar[int]
    open_connections: ClassVar[OpenConnections]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._unfinished = 0
        self._in_body = False
        self._waits = False  # above the limit of connections
        self.address = ""
        self.received = 0  # bytes of the current request
        self._last_received = 0.0
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None  # runs while the client has something to read
        self._cycles: list[RequestResponseCycle] = []

    @classmethod
    def with_limits(cls, max_head_bytes: int, open_connections: OpenConnections) -> type[BoundedHttp]:
        return type(cls.__name__, (cls,), {"max_head_bytes": max_head_bytes, "open_connections": open_connections})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        set_keepalive_options(transport.get_extra_info("socket"))
        # What the kernel does not accept at once counts as waiting for the client.
        transport.set_write_buffer_limits(high=0)
        self.address = client_address(self.client)
        self._waits = not self.open_connections.enter(self)
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        self.open_connections.leave(self)
        # The parent class notifies only the newest request of a pipeline of the disconnect.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._last_received = self.loop.time()
        super().data_received(data)
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_more()  # not the beginning of a request, or the rest of an answered one
        if self._in_head:
            # The parser buffers a header until it is complete, so its bytes are counted here.
            self._unfinished += len(data)
            if self._unfinished > self.max_head_bytes and not self.transport.is_closing():
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._unfinished = True, 0, 0
        if self._head_timer is None:
            self._expect_more()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._in_head, self._in_body = False, True
        self.scope["state"]["connection"] = self
        self.open_connections.work(self)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self.cycle is not None:
            self._cycles.append(self.cycle)
            self.cycle.keep_alive = self.cycle.keep_alive and not self._waits

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self.received = 0
            self.open_connections.rest(self)
        super().on_response_complete()
        if self._in_body and not self.pipeline and not self.transport.is_closing():
            self._expect_more()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    @property
    def is_sending(self) -> bool:
        return self._in_body

    @property
    def is_stalled(self) -> bool:
        # Nothing arrives while the server itself does not read.
        return self._in_body and not self.flow.read_paused and self.loop.time() - self._last_received > STALLED_BODY_S

    def claim(self, tenant: str) -> None:
        """Count it for the tenant of its request, if there is one. Raises Unavailable where it cannot stay."""
        if not self.open_connections.claim(self, tenant):
            raise too_many_connections_error(self.open_connections.most)

    def evict(self, why: IngotError | None = None) -> None:
        """Close the connection, with an error where its answer has not begun: by default that there are too many."""
        unfinished = [cycle for cycle in self._cycles if not cycle.response_complete]
        for cycle in unfinished:
            cycle.disconnected = True
            cycle.message_event.set()
        if len(unfinished) == 1 and not unfinished[0].response_started:
            error = why or too_many_connections_error(self.open_connections.most)
            unfinished[0].scope["state"]["closed_with"] = error  # for the log: its client has not left
            self._refuse(error)
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """The parser failed: because of our limit, or because this is not HTTP."""
        if self._head_bytes > self.max_head_bytes:
            self._refuse_head()
        else:
            self._refuse(BadRequest("This is not a valid HTTP request."))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_head_bytes:
            raise ValueError("the head is too large")  # stops the parser, which then calls send_400_response

    def _expect_more(self) -> None:
        """Wait for the next headers, or the rest of an ignored body, within bounded time."""
        self._stop_waiting()
        seconds = WAITING_HEAD_TIMEOUT_S if self._waits else HEAD_TIMEOUT_S
        self._head_timer = self.loop.call_later(seconds, self.transport.close)

    def _expect_reading(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(UNREAD_ANSWER_S, self._check_reading, waiting)

    def _check_reading(self, waited: int) -> None:
        """Nothing is written while the buffer is not empty, so a change means that the client has read."""
        if self.transport.get_write_buffer_size() != waited:
            self._expect_reading()
            return
        unread_notice.warn(
            "a client read nothing for %g seconds while %d bytes waited; it was dropped", UNREAD_ANSWER_S, waited
        )
        if self.cycle is not None:
            self.cycle.scope["state"]["gone"] = f"The client did not read its answer for {UNREAD_ANSWER_S:g} seconds."
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self) -> None:
        self._refuse(HeadersTooLarge(f"The headers of a request may have {self.max_head_bytes} bytes."))

    def _refuse(self, error: IngotError) -> None:
        body = msgspec.json.encode(ErrorBody.of(error))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        if (seconds := retry_after(error)) is not None:
            head += b"retry-after: %s\r\n" % seconds.encode()
        self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()


def too_many_connections_error(most: int) -> Unavailable:
    return Unavailable(f"All {most} connections of the server are in use.", retry_after=1)


def server_config(app: Any, settings: Settings, *, keep_alive_s: int, shutdown_s: int) -> uvicorn.Config:
    """`keep_alive_s` is how long a connection may be idle, `shutdown_s` how long answers may take when the server
    stops."""
    return uvicorn.Config(
        app,
        http=BoundedHttp.with_limits(
            settings.max_header_bytes, OpenConnections(affordable_connections(settings.max_connections))
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # The connections that are accepted at once, and how often a lack of file descriptors is logged. The kernel's
        # own backlog is set by `listen`.
        backlog=1,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=shutdown_s,
    )
