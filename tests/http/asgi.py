"""One call of an ASGI application, driven by hand: the test decides when bytes come and when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message

from tests.waiting import WAIT_S


class Call:
    """`async with Call(app, ...) as call`: the application runs beside the block."""

    def __init__(
        self,
        app: ASGIApp,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.app = app
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"host": "127.0.0.1", "content-type": "application/json", **(headers or {})}
        path, _, query = path.partition("?")
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.writes: list[bytes] = []
        self.complete = False
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Call:
        self.task = asyncio.create_task(self.app(self.scope, self._receive, self._send))  # type: ignore[arg-type]
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    def leave(self) -> None:
        """The client closes the connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(happened)

    async def done(self) -> Call:
        async with asyncio.timeout(WAIT_S):
            await self.task
        return self

    def json(self) -> Any:
        return json.loads(self.body)

    async def _receive(self) -> Message:
        return await self._incoming.get()

    async def _send(self, message: Message) -> None:
        async with self._changed:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                assert self.status, "a body before its head"
                assert not self.complete, "a body after the last one"
                self.writes.append(message.get("body", b""))
                self.body += self.writes[-1]
                self.complete = not message.get("more_body", False)
            self._changed.notify_all()


async def call(app: ASGIApp, method: str = "POST", path: str = "/v1/chat/completions", **given: Any) -> Call:
    """A call from beginning to end, by a client that waits."""
    async with Call(app, method, path, **given) as made:
        return await made.done()


def events(body: bytes) -> list[Any]:
    """The data of a stream's events, `[DONE]` as it stands; asserts that the framing is exact."""
    assert body.endswith(b"\n\n")
    frames = body[:-2].split(b"\n\n")
    data = [frame.removeprefix(b"data: ") for frame in frames if not frame.startswith(b":")]
    assert all(frame.startswith((b"data: ", b": ")) and b"\n" not in frame for frame in frames)
    return [one.decode() if one == b"[DONE]" else json.loads(one) for one in data]
