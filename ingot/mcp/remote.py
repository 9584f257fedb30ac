"""A server that is reached over HTTP: answers of bounded size, whatever it sends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx2

from ingot.mcp.config import MESSAGE_BYTES

Fault = Callable[[str], None]


class BoundedTransport(httpx2.AsyncHTTPTransport):
    """httpx's, for clients that gather whole answers. What is too much ends in a ReadError."""

    def __init__(self, on_fault: Fault) -> None:
        super().__init__()
        self._on_fault = on_fault

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise self._fault("it sent a compressed answer, which was not asked for")
        media = response.headers.get("content-type", "").partition(";")[0].strip()
        # Streams of events may go on for as long as the connection does; the SDK bounds each event.
        if media != "text/event-stream":
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = Bounded(response.stream, self._fault)
        return response

    def _fault(self, why: str) -> httpx2.ReadError:
        self._on_fault(why)
        return httpx2.ReadError(why)


class Bounded(httpx2.AsyncByteStream):
    """A body of bounded size."""

    def __init__(self, stream: httpx2.AsyncByteStream, fault: Callable[[str], Exception]) -> None:
        self._stream, self._fault = stream, fault

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._stream:
            size += len(piece)
            if size > MESSAGE_BYTES:
                raise self._fault(f"it sent a message of more than {MESSAGE_BYTES >> 20} MiB")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
