"""A server with the page and the API it calls, whose answers the test writes.

A test scripts what the next chat request gets with `answer` or `refuse`; without a script the server echoes. An
answer's pieces are sent as the test releases them, so nothing here depends on how fast anyone is.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ingot.http.endpoints.page import PAGE_HEADERS, page_routes
from tests.waiting import WAIT_S


class Gate:
    """Lets a scripted answer go on: each `release` lets one more piece out, `open` all of them."""

    def __init__(self) -> None:
        self._pieces = threading.Semaphore(0)
        self._opened = threading.Event()

    def release(self, pieces: int = 1) -> None:
        self._pieces.release(pieces)

    def open(self) -> None:
        self._opened.set()
        self._pieces.release()

    def passes(self) -> bool:
        return self._opened.is_set() or self._pieces.acquire(blocking=False)


@dataclass
class Answer:
    """One scripted answer and, afterwards, what became of it."""

    pieces: list[str]
    thoughts: tuple[str, ...] = ()
    gate: Gate = field(default_factory=Gate)
    error: dict[str, Any] | None = None
    breaks_off: bool = False
    finish: str = "stop"
    prompt_tokens: int = 12
    cached_tokens: int = 0
    receipt: dict[str, Any] = field(default_factory=dict)
    disconnected: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)


@dataclass
class Refusal:
    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)


class ScriptedServer:
    """Serves on a free loopback port in a thread of its own until `close`."""

    def __init__(self) -> None:
        self.reset()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(self._application(), log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self.script: deque[Answer | Refusal] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.polls = 0
        self.api_key: str | None = None
        self.models: list[dict[str, Any]] = [{"id": "smollm2-135m", "object": "model", "max_model_len": 8192}]
        self.requests: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.live: dict[str, Any] = {"ready": True, "detail": "ok", "requests": [], "past": []}
        self.changed: list[str] = []
        self.tree: list[dict[str, Any]] = []
        self.heard: list[tuple[str, bytes]] = []  # models that were to hear, and what
        self.transcript = "What was said."
        self.spoken: list[dict[str, Any]] = []
        self.sound: bytes | None = bytes(4800)  # of every text: a tenth of a second; None: it never ends
        self.health: tuple[int, dict[str, Any]] = (200, {"ok": True, "detail": "idle", "running": 0, "queued": 0})

    def answer(self, *pieces: str, held: bool = False, **facts: Any) -> Answer:
        """Scripts the next answer. When `held`, its pieces wait for `gate.release` or `gate.open`."""
        answer = Answer(list(pieces), **facts)
        if not held:
            answer.gate.open()
        self.script.append(answer)
        return answer

    def refuse(self, status: int, message: str, **headers: str) -> None:
        self.script.append(Refusal(status, message, headers))

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._socket.close()

    def _application(self) -> Starlette:
        return Starlette(
            routes=[
                *map(_asked_for_once, page_routes()),
                Route("/blank", self._blank),
                Route("/v1/models", self._models),
                Route("/v1/models/{id:path}/{what}", self._change, methods=["POST"]),
                Route("/v1/live", self._live),
                Route("/v1/cache/tree", self._tree),
                Route("/v1/requests", self._requests),
                Route("/v1/requests/{id}", self._cancel, methods=["DELETE"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/audio/transcriptions", self._transcribe, methods=["POST"]),
                Route("/v1/audio/speech", self._speak, methods=["POST"]),
                Route("/health/ready", self._health),
            ]
        )

    async def _blank(self, request: Request) -> Response:
        return Response("<!doctype html>", media_type="text/html", headers=PAGE_HEADERS)

    async def _models(self, request: Request) -> Response:
        return self._denied(request) or JSONResponse({"object": "list", "data": self.models})

    async def _change(self, request: Request) -> Response:
        id, what = request.path_params["id"], request.path_params["what"]
        self.changed.append(f"{what} {id}")
        for model in self.models:
            if model["id"] == id:
                model["state"] = f"{what}ed"
        return self._denied(request) or JSONResponse({})

    async def _live(self, request: Request) -> Response:
        self.polls += 1
        return self._denied(request) or JSONResponse(self.live)

    async def _tree(self, request: Request) -> Response:
        return self._denied(request) or JSONResponse({"data": self.tree})

    async def _requests(self, request: Request) -> Response:
        self.polls += 1
        return self._denied(request) or JSONResponse({"data": self.requests})

    async def _cancel(self, request: Request) -> Response:
        self.cancelled.append(request.path_params["id"])
        self.requests = [row for row in self.requests if row["id"] != request.path_params["id"]]
        return self._denied(request) or JSONResponse({"id": request.path_params["id"], "cancelled": True})

    async def _health(self, request: Request) -> Response:
        status, body = self.health
        return JSONResponse(body, status_code=status)

    async def _chat(self, request: Request) -> Response:
        denied = self._denied(request)
        if denied:
            return denied
        body = await request.json()
        self.bodies.append(body)
        step = self.script.popleft() if self.script else self._echo(body)
        if isinstance(step, Refusal):
            return _error(step.status, step.message, step.headers)
        return StreamingResponse(_stream(request, step), media_type="text/event-stream")

    async def _transcribe(self, request: Request) -> Response:
        async with request.form() as form:
            file = form["file"]
            assert not isinstance(file, str)
            self.heard.append((str(form["model"]), await file.read()))
        return self._denied(request) or JSONResponse({"text": self.transcript})

    async def _speak(self, request: Request) -> Response:
        self.spoken.append(await request.json())
        return self._denied(request) or StreamingResponse(_sound(self.sound), media_type="audio/pcm")

    def _denied(self, request: Request) -> Response | None:
        if self.api_key is None or request.headers.get("authorization") == f"Bearer {self.api_key}":
            return None
        return _error(401, "This server needs an API key.", {})

    @staticmethod
    def _echo(body: dict[str, Any]) -> Answer:
        answer = Answer([f"You said: {body['messages'][-1]['content']}"])
        answer.gate.open()
        return answer


def _asked_for_once(file: Route) -> Route:
    """A browser asks about some fifty files each time that a page opens. Here it does so once for all tests."""

    async def serve(request: Request) -> Response:
        response: Response = await file.endpoint(request)
        response.headers["cache-control"] = "max-age=86400"
        return response

    return Route(file.path, serve)


def _error(status: int, message: str, headers: dict[str, str]) -> Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "scripted"}}
    return JSONResponse(body, status_code=status, headers=headers)


async def _sound(sound: bytes | None) -> AsyncIterator[bytes]:
    if sound is not None:
        yield sound[:1001]  # parts need not end where samples do
        yield sound[1001:]
    while sound is None:
        yield bytes(4800)
        await asyncio.sleep(0.05)


async def _stream(request: Request, answer: Answer) -> AsyncIterator[str]:
    try:
        yield ": the headers come at once\n\n"
        yield _chunk(choices=[_choice({"role": "assistant", "content": ""})])
        for thought in answer.thoughts:
            await _passage(answer.gate)
            yield _chunk(choices=[_choice({"reasoning_content": thought, "reasoning": thought})])
        for piece in answer.pieces:
            await _passage(answer.gate)
            yield _chunk(choices=[_choice({"content": piece})])
        if answer.breaks_off:
            return
        if answer.error:
            yield f"data: {json.dumps({'error': answer.error})}\n\n"
            return
        await _passage(answer.gate)
        yield _chunk(choices=[_choice({}, answer.finish)])
        yield _chunk(choices=[], usage=_usage(answer), ingot=answer.receipt)
        yield "data: [DONE]\n\n"
        answer.finished.set()
    finally:
        # Starlette closes the generator when the client has gone.
        if not answer.finished.is_set():
            answer.disconnected.set()


async def _passage(gate: Gate) -> None:
    while not gate.passes():
        await asyncio.sleep(0.01)


def _choice(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.pieces),
        "total_tokens": answer.prompt_tokens + len(answer.pieces),
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _chunk(**fields: Any) -> str:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "smollm2-135m", **fields}
    return f"data: {json.dumps(chunk)}\n\n"
