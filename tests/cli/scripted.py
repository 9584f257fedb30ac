"""An OpenAI-compatible server that answers by a script, and what the tests of commands share."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def environment(home: Path, **extra: str) -> dict[str, str]:
    """That of a user who has nothing of ours set up."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("INGOT_", "XDG_"))}
    return inherited | {"HOME": str(home), "TERM": "dumb", "COLUMNS": "100"} | extra


@dataclass
class Answer:
    """`pieces` become chunks of their own. With `hangs`, the stream then stays open until the client leaves."""

    pieces: tuple[str, ...] = ("Hello", " there")
    prompt_tokens: int = 7
    usage: bool = True
    hangs: bool = False
    breaks_off: bool = False
    error: str | None = None  # an error event after the pieces
    status: int = 200
    body: bytes = b""  # of an answer with another status


@dataclass
class Script:
    """What the server says and what it saw."""

    answer: Callable[[Mapping[str, Any]], Answer] = lambda body: Answer()
    owned_by: str = "someone"
    about: dict[str, Any] = field(default_factory=dict)  # other fields of the model's card
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gathers: int = 0  # streams wait until so many have come
    gathered: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: int = 0
    most_at_once: int = 0
    hangs: threading.Event = field(default_factory=threading.Event)  # a stream says nothing more
    left: threading.Event = field(default_factory=threading.Event)  # a client left it
    url: str = ""


@contextmanager
def scripted_server(script: Script) -> Iterator[Script]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(lambda r, w: _connection(script, r, w), "127.0.0.1", 0)

    async def stop() -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _connection(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        script.headers.append(headers)
        await _respond(script, head[0].split()[1], body, reader, writer)
    finally:
        writer.close()


async def _respond(
    script: Script, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if path == "/v1/models":
        return await _json(writer, {"data": [{"id": "scripted", "owned_by": script.owned_by, **script.about}]})
    if path not in ("/v1/chat/completions", "/v1/completions"):
        return await _json(writer, {"error": {"message": f"no such path: {path}"}}, 404)
    script.bodies.append(body)
    answer = script.answer(body)
    if answer.status != 200:
        return await _raw(writer, answer.status, answer.body)
    if not body.get("stream"):
        return await _json(writer, {"usage": _usage(answer), "choices": []})
    script.at_once += 1
    script.most_at_once = max(script.most_at_once, script.at_once)
    if script.most_at_once >= script.gathers:
        script.gathered.set()
    try:
        await script.gathered.wait()
        await _stream(script, answer, path, reader, writer)
    except ConnectionError:  # a client that leaves with bytes unread resets the connection
        script.left.set()
    finally:
        script.at_once -= 1


async def _stream(
    script: Script, answer: Answer, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    await _event(writer, b": keep-alive\n\n")
    for piece in answer.pieces:
        choice = {"text": piece} if path == "/v1/completions" else {"delta": {"content": piece}}
        await _event(writer, _data({"choices": [choice], "usage": None}))
        await asyncio.sleep(0)
    if answer.hangs:
        script.hangs.set()
        await reader.read()
        script.left.set()
        return
    if answer.breaks_off:
        return
    if answer.error is not None:
        await _event(writer, _data({"error": {"message": answer.error}}))
    if answer.usage:
        await _event(writer, _data({"choices": [], "usage": _usage(answer)}))
    await _event(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def _usage(answer: Answer) -> dict[str, int]:
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": len(answer.pieces)}


def _data(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


async def _event(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


async def _json(writer: asyncio.StreamWriter, body: Mapping[str, Any], status: int = 200) -> None:
    await _raw(writer, status, json.dumps(body).encode())


async def _raw(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
    await writer.drain()
