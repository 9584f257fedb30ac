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
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    items: list[dict[str, Any]] = field(default_factory=list)  # of its output, before its text
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
        self.stores = True
        self.headers: dict[str, str] = {}  # of answers
        self.stored: dict[str, Run] = {}  # responses in the background that were not deleted
        self.resumed: list[int] = []  # after which events streams were resumed
        self.refused_resumptions = 0  # of the next requests about stored responses
        self.forgets_events = False
        self.title, self.titled = "", list[dict[str, Any]]()  # what titles are, and requests for them
        self.polls = 0
        self.api_key: str | None = None
        self.models: list[dict[str, Any]] = [{"id": "smollm2-135m", "object": "model", "max_model_len": 8192}]
        self.requests: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.live: dict[str, Any] = {"ready": True, "detail": "ok", "requests": [], "past": []}
        self.changed: list[str] = []
        self.added, self.refused_model = Gate(), ""
        self.recommended: list[dict[str, Any]] = []
        self.mcp: list[dict[str, Any]] = []
        self.chats: list[dict[str, Any]] = []  # bodies of chat completions
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
                *page_routes(),
                Route("/blank", self._blank),
                Route("/v1/models", self._models),
                Route("/v1/models", self._add, methods=["POST"]),
                Route("/v1/models/recommended", self._recommended),
                Route("/v1/mcp", self._mcp),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models/{id:path}/{what}", self._change, methods=["POST"]),
                Route("/v1/live", self._live),
                Route("/v1/cache/tree", self._tree),
                Route("/v1/requests", self._requests),
                Route("/v1/requests/{id}", self._cancel, methods=["DELETE"]),
                Route("/v1/responses", self._respond, methods=["POST"]),
                Route("/v1/responses/{id}", self._stored, methods=["GET", "DELETE"]),
                Route("/v1/audio/transcriptions", self._transcribe, methods=["POST"]),
                Route("/v1/audio/speech", self._speak, methods=["POST"]),
                Route("/health/ready", self._health),
            ]
        )

    async def _blank(self, request: Request) -> Response:
        return Response("<!doctype html>", media_type="text/html", headers=PAGE_HEADERS)

    async def _models(self, request: Request) -> Response:
        return self._denied(request) or JSONResponse({"object": "list", "data": self.models})

    async def _add(self, request: Request) -> Response:
        """Half of the model is there until the test opens `added`."""
        denied = self._denied(request)
        if denied:
            return denied
        card = {"id": (await request.json())["model"], "kind": "chat", "state": "loading", "progress": 0.5}
        self.models.append(card)
        while not self.added.passes():
            await asyncio.sleep(0.01)
        if self.refused_model:
            self.models.remove(card)
            return _error(503, self.refused_model, {})
        card |= {"state": "loaded", "progress": None}
        return JSONResponse(card)

    async def _recommended(self, request: Request) -> Response:
        return self._denied(request) or JSONResponse({"data": self.recommended})

    async def _mcp(self, request: Request) -> Response:
        return self._denied(request) or JSONResponse({"data": self.mcp})

    async def _chat(self, request: Request) -> Response:
        """A few words, in the name of the model."""
        body = await request.json()
        self.chats.append(body)
        words = [f"{body['model']} ", "says ", "so."]
        chunks = [{"choices": [{"delta": {"content": word}}]} for word in words]
        usage = {"prompt_tokens": len(body["messages"][0]["content"]), "completion_tokens": 3}
        chunks.append({"choices": [], "usage": usage})
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return Response(f"{lines}data: [DONE]\n\n", media_type="text/event-stream")

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

    async def _respond(self, request: Request) -> Response:
        denied = self._denied(request)
        if denied:
            return denied
        body = await request.json()
        if body.get("metadata") == {"purpose": "title"}:
            self.titled.append(body)
            return JSONResponse({"output": [_message(self.title)]})
        if body.get("background") and not self.stores:
            return _error(400, "store is not supported: this server stores no responses.", {}, "store")
        self.bodies.append(body)
        step = self.script.popleft() if self.script else self._echo(body)
        if isinstance(step, Refusal):
            return _error(step.status, step.message, step.headers)
        run = Run(f"resp_{len(self.bodies):024x}", step, background=bool(body.get("background")))
        run.task = asyncio.create_task(run.work())
        if run.background:
            self.stored[run.id] = run
        return StreamingResponse(run.stream(request, -1), media_type="text/event-stream", headers=self.headers)

    async def _stored(self, request: Request) -> Response:
        run = self.stored.get(request.path_params["id"])
        if self.refused_resumptions:
            self.refused_resumptions -= 1
            return _error(503, "The server starts.", {})
        if run is None:
            return self._denied(request) or _error(404, "There is no such response.", {})
        if request.method == "DELETE":
            del self.stored[run.id]
            run.end("cancelled")
            return JSONResponse({"deleted": True})
        if request.query_params.get("stream") != "true":
            return JSONResponse(run.response)
        if self.forgets_events:
            return _error(400, "Its events are no longer stored. Retrieve it whole.", {}, "stream")
        self.resumed.append(int(request.query_params.get("starting_after", -1)))
        return StreamingResponse(run.stream(request, self.resumed[-1]), media_type="text/event-stream")

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
        answer = Answer([f"You said: {body['input'][-1]['content']}"])
        answer.gate.open()
        return answer


def _error(status: int, message: str, headers: dict[str, str], param: str | None = None) -> Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": "scripted"}}
    return JSONResponse(body, status_code=status, headers=headers)


async def _sound(sound: bytes | None) -> AsyncIterator[bytes]:
    if sound is not None:
        yield sound[:1001]  # parts need not end where samples do
        yield sound[1001:]
    while sound is None:
        yield bytes(4800)
        await asyncio.sleep(0.05)


async def _passage(gate: Gate) -> None:
    while not gate.passes():
        await asyncio.sleep(0.01)


class Run:
    """A response: its events come as the script lets them, whoever reads them."""

    def __init__(self, id: str, answer: Answer, *, background: bool) -> None:
        self.id, self.answer, self.background = id, answer, background
        self.events: list[dict[str, Any]] = []
        self.response: dict[str, Any] = {}
        self.ended = False
        self.breaks_off = answer.breaks_off
        self.task: asyncio.Task[None] | None = None

    async def work(self) -> None:
        answer = self.answer
        self._add("response.created", response=self._body("queued"))
        for thought in answer.thoughts:
            await _passage(answer.gate)
            self._add("response.reasoning_text.delta", delta=thought)
        for piece in answer.pieces:
            await _passage(answer.gate)
            self._add("response.output_text.delta", delta=piece)
        if answer.error:
            self.end("failed")
            return
        await _passage(answer.gate)
        self.end("incomplete" if answer.finish == "length" else "completed")

    def end(self, status: str) -> None:
        if self.ended:
            return
        self.ended = True
        (self.answer.disconnected if status == "cancelled" else self.answer.finished).set()
        type = {"completed": "response.completed", "incomplete": "response.incomplete"}.get(status, "response.failed")
        self._add(type, response=self._body(status))
        if self.task is not None and status == "cancelled":
            self.task.cancel()

    async def stream(self, request: Request, after: int) -> AsyncIterator[str]:
        try:
            yield ": the headers come at once\n\n"
            at = after + 1
            while not (self.ended and at == len(self.events)):
                for event in self.events[at:]:
                    yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
                at = len(self.events)
                if self.breaks_off and at > 1:
                    self.breaks_off = False
                    return
                await asyncio.sleep(0.01)
        finally:
            # Starlette closes the generator when the client has gone.
            if not self.background:
                self.end("cancelled")

    def _add(self, type: str, **fields: Any) -> None:
        self.events.append({"type": type, "sequence_number": len(self.events), **fields})

    def _body(self, status: str) -> dict[str, Any]:
        answer, count = self.answer, len(self.answer.pieces)
        thoughts = {"type": "reasoning", "summary": [], "content": [{"text": "".join(answer.thoughts)}]}
        message = _message("".join(answer.pieces))
        message["content"][0]["logprobs"] = answer.logprobs
        ended = status in ("completed", "incomplete")
        self.response = {
            "id": self.id,
            "status": status,
            "background": self.background,
            "model": "smollm2-135m",
            "error": answer.error if status == "failed" else None,
            "output": [*([thoughts] if answer.thoughts else []), *answer.items, message] if ended else [],
        }
        if ended:
            self.response |= {"ingot": answer.receipt, "usage": _usage(answer, count)}
        return self.response


def _message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def _usage(answer: Answer, count: int) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": count,
        "total_tokens": answer.prompt_tokens + count,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
