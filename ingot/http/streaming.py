"""Streamed and slow responses: how chunks are framed (server-sent events, bare as in OpenAI's chat or named as in
Anthropic's and the Responses API; newline-delimited JSON), and how they are sent.

A streamed response sends its headers at once, frames as they come, and keep-alives in between; a whole one, white space
before its JSON. A feed holds the events of a background response for its readers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from msgspec import Struct
from starlette.types import Message, Send

from ingot.config import Settings
from ingot.errors import IngotError
from ingot.http.edge import ClientGone, Reply, as_ingot_error
from ingot.http.request_lifetime import background_task
from ingot.protocol.errors import ErrorBody, error_body
from ingot.protocol.operations import FramingName, Operation, load


@dataclass(frozen=True, slots=True)
class StreamFraming:
    """`frame` adds one chunk to a buffer. `done` follows the last chunk of a complete answer; `alive` is the
    keep-alive, empty where the format only has chunks."""

    media_type: str
    frame: Callable[[bytearray, Struct], None]
    done: bytes = b""
    alive: bytes = b""

    def framed(self, chunks: Iterable[Struct]) -> bytes:
        buffer = bytearray()
        for chunk in chunks:
            self.frame(buffer, chunk)
        return bytes(buffer)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", self.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]


SSE_DONE: Final = b"data: [DONE]\n\n"
SSE_KEEP_ALIVE: Final = b": keep-alive\n\n"
SSE_MEDIA_TYPE: Final = "text/event-stream; charset=utf-8"
json_encoder = msgspec.json.Encoder()


def frame_bare_event(buffer: bytearray, chunk: Struct) -> None:
    buffer += b"data: "
    json_encoder.encode_into(chunk, buffer, -1)
    buffer += b"\n\n"


def frame_named_event(buffer: bytearray, chunk: Struct) -> None:
    """An event named by the chunk's `type`, which is a field or the tag of its class."""
    name = getattr(chunk, "type", None) or chunk.__struct_config__.tag
    buffer += b"event: %s\n" % str(name).encode()
    frame_bare_event(buffer, chunk)


def frame_json_line(buffer: bytearray, chunk: Struct) -> None:
    json_encoder.encode_into(chunk, buffer, -1)
    buffer += b"\n"


NDJSON_LINES: Final = StreamFraming("application/x-ndjson", frame_json_line)
BARE_EVENTS: Final = StreamFraming(SSE_MEDIA_TYPE, frame_bare_event, done=SSE_DONE, alive=SSE_KEEP_ALIVE)
# llama.cpp's, whose last chunk has a field that says so.
BARE_CHUNKS: Final = StreamFraming(SSE_MEDIA_TYPE, frame_bare_event, alive=SSE_KEEP_ALIVE)
NAMED_EVENTS: Final = StreamFraming(SSE_MEDIA_TYPE, frame_named_event, alive=SSE_KEEP_ALIVE)
FRAMINGS: Final[dict[FramingName, StreamFraming]] = {
    "events": BARE_EVENTS,
    "chunks": BARE_CHUNKS,
    "named events": NAMED_EVENTS,
    "lines": NDJSON_LINES,
}


def framing_of(operation: Operation) -> StreamFraming:
    """The framing of an operation's stream. Some protocols' keep-alive is an event."""
    framing, alive = FRAMINGS[operation.framing], operation.wire.alive
    return framing if alive is None else replace(framing, alive=framing.framed([load(alive)()]))


class StreamedResponse:
    """`keep_alive` runs concurrently with `write`; it sends nothing while a write waits."""

    def __init__(self, send: Send, framing: StreamFraming, settings: Settings) -> None:
        self._send = send
        self.framing = framing
        self._keepalive_s, self._event_s = settings.keepalive_s, settings.idle_event_s
        self._clock = asyncio.get_running_loop().time
        self._last_write = self._last_event = 0.0
        self._writing = False
        self.started = False

    async def start(self) -> None:
        self.started = True
        self._last_write = self._last_event = self._clock()
        await self._send({"type": "http.response.start", "status": 200, "headers": self.framing.headers})

    async def write(self, frames: bytes) -> None:
        """Send events, if there are any."""
        if frames:
            await self._write(frames)
            self._last_event = self._last_write

    async def keep_alive(self, empty: Callable[[], list[Struct]]) -> None:
        """Sends keep-alives, and less often empty events, as some clients count only those as activity."""
        while True:
            now = self._clock()
            if self._writing:
                pass
            elif now - self._last_event >= self._event_s:
                self._last_event = now
                await self.write(self.framing.framed(empty()))
            elif now - self._last_write >= self._keepalive_s:
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
        self._last_write = self._clock()

    def _until_next(self) -> float:
        now = self._clock()
        left = min(self._last_write + self._keepalive_s - now, self._last_event + self._event_s - now)
        return max(left, min(self._keepalive_s, self._event_s) / 10)


@asynccontextmanager
async def reporting_errors(
    answer: Reply,
    held: WholeResponse,
    out: StreamedResponse | None = None,
    failed: Callable[[IngotError], Iterable[Struct]] = lambda error: [ErrorBody.of(error)],
) -> AsyncIterator[None]:
    """Ends an answer that has begun with the error that the block raises: a whole one as its body, a stream as the
    chunks of `failed`."""
    try:
        yield
    except ClientGone:
        raise
    except Exception as error:
        if held.begun:
            await held.fail(as_ingot_error(error, answer.id))
        elif out is not None and out.started:
            await out.end(out.framing.framed(failed(as_ingot_error(error, answer.id))))
        else:
            raise


class WholeResponse:
    """One JSON body. Clients and proxies give up where nothing comes for minutes, so a slow body begins with white
    space, which JSON allows. Its status is 200 by then: a later error is the body, in the protocol's format.

    `send` sends the response; it drops its headers where they were sent before.
    """

    def __init__(self, answer: Reply, send: Send, settings: Settings) -> None:
        self._answer, self._send, self._every_s = answer, send, settings.idle_body_s
        self.begun = False

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Sends white space for as long as the block lasts."""
        async with background_task(self._send_spaces()):
            yield

    async def send(self, message: Message) -> None:
        if not self.begun or message["type"] != "http.response.start":
            await self._send(message)

    async def fail(self, error: IngotError) -> None:
        body = error_body(error, self._answer.scope["path"], self._answer.id)
        await self._send({"type": "http.response.body", "body": msgspec.json.encode(body)})

    async def _send_spaces(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            if not self.begun:
                self.begun = True
                headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-cache")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": b" ", "more_body": True})


MOST_FEED_BATCHES: Final = 65_536


class EventFeed:
    """Batches of events, of which the latest are held. A reader that falls further behind is cut off; the store has the
    response."""

    def __init__(self) -> None:
        self._batches: deque[list[Struct]] = deque(maxlen=MOST_FEED_BATCHES)
        self._count = 0  # batches in all
        self._more = asyncio.Event()
        self._ended = False

    def __len__(self) -> int:
        """Batches that are held."""
        return len(self._batches)

    @property
    def whole(self) -> bool:
        """Whether the first batch is still held."""
        return self._count == len(self._batches)

    def put(self, batch: list[Struct]) -> None:
        self._batches.append(batch)
        self._count += 1
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def reader(self) -> EventFeedReader:
        """Reads from the first event, of a feed that is `whole`."""
        return EventFeedReader(self)

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


class EventFeedReader:
    def __init__(self, feed: EventFeed) -> None:
        self._feed, self._next = feed, 0

    def __len__(self) -> int:
        """Batches that wait to be read."""
        return self._feed._count - self._next

    async def batches(self) -> AsyncGenerator[list[Struct], None]:
        feed = self._feed
        while True:
            while len(self):
                behind = len(self)
                if behind > len(feed._batches):
                    raise ClientGone
                self._next += 1
                yield feed._batches[-behind]
            if feed._ended:
                return
            await feed._more.wait()
