"""An engine that says what a test wrote down, behind the same door as the real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette

from ingot.config import Settings
from ingot.engine.request import (
    CacheReport,
    Ended,
    Event,
    Failed,
    LoraRef,
    ModelCard,
    PromptScored,
    Request,
    RequestStatus,
    SequenceEnded,
    TextDelta,
    Timing,
    TokenInfo,
    TokenLogprob,
    Usage,
)
from ingot.engine.status import CacheBranch, CacheStatus, CacheTotals, Health, SaltStatus
from ingot.errors import BadRequest, Cancelled, ContextOverflow, IngotError
from ingot.http import app
from ingot.http.request_lifetime import RequestLifetime
from ingot.observe.metrics import EngineMetrics, SpeculationMetrics
from ingot.text.chat_template.chat_template import ChatTemplate
from ingot.text.tokenizer.special_tokens import ControlTokens, Infill

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood %}[{{ mood }}] {% endif %}{% endif %}"
)
VOCAB = 300
BOS = 256
CONTEXT = 4096


@cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template)


class ByteTokenizer:
    """Each byte is a token; 256 begins a text, the ids above it have no text."""

    vocab_size = VOCAB
    eos_ids = frozenset({257})
    special_ids = frozenset({BOS, 257})
    controls = ControlTokens()  # no byte is one
    response_template = None

    def __init__(self, template: str | None = CHATML, *, bos: bool = True, infill: Infill | None = None) -> None:
        self.infill, self.first_ids = infill, (BOS,) * bos
        self.template = compiled(template) if template is not None else None
        self.bos = bos

    def encode(self, text: str, *, add_special: bool, quoted: Collection[int] | None = None) -> list[int]:
        return [BOS] * (add_special and self.bos) + list(text.encode())

    def encode_plain(self, text: str, *, leads: bool = True) -> list[int]:
        return list(text.encode())

    def least_tokens(self, text: str) -> int:
        return len(text.encode())

    def sets_apart(self, text: str) -> bool:
        return True

    def encode_with_offsets(
        self, text: str, places: Sequence[int], *, add_special: bool, quoted: Collection[int] | None = None
    ) -> tuple[list[int], list[int]]:
        first = self.encode("", add_special=add_special)
        return first + list(text.encode()), [len(first) + len(text[:place].encode()) for place in places]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes(token) for token in ids if token < BOS or not skip_special).decode(
            errors="replace"
        )

    def special_within(self, markers: frozenset[str]) -> frozenset[int]:
        return frozenset()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < BOS else b"<bos>" if token == BOS else b""


CARD = ModelCard(
    name="org/toy",
    source="test",
    family="toy",
    context=CONTEXT,
    vocab=VOCAB,
    device="none",
    dtype="none",
    weight_bytes=0,
    memory_budget=0,
    max_sequences=8,
    created=1_700_000_000,
    quantization="Q4_K_M",
)

Script = Callable[[Request], Iterable[list[Event]]]


def info(text: str, logprob: float = -0.5, top: Iterable[tuple[str, float]] = ()) -> TokenInfo:
    def one(text: str, logprob: float) -> TokenLogprob:
        return TokenLogprob(text.encode()[0], text, text.encode(), logprob)

    return TokenInfo(one(text, logprob), tuple(one(*entry) for entry in top))


def hello(request: Request, words: Sequence[str] = ("Hello", ", ", "world")) -> list[list[Event]]:
    """Every sequence says `words`, one a batch, or as many of them as it may."""
    count = len(request.prompts) * request.n
    said = words[: request.max_tokens] if request.max_tokens is not None else words
    batches: list[list[Event]] = []
    if request.sampling.prompt_logprobs is not None:
        batches.append([scored(index, request.prompts[index // request.n]) for index in range(count)])
    for word in said:
        tokens = (info(word, top=[("x", -2.0)]),) if request.sampling.logprobs is not None else ()
        batches.append([TextDelta(index, word, tokens) for index in range(count)])
    reason = "stop" if len(said) == len(words) else "length"
    batches.append([SequenceEnded(index, reason, None, len(said), -0.5 * len(said)) for index in range(count)])
    usage = Usage(sum(map(len, request.prompts)), len(said) * count)
    return [*batches, [Ended(usage, Timing(0.1, 0.2, 0.3))]]


def scored(index: int, prompt: Sequence[int]) -> PromptScored:
    entries = [TokenInfo(TokenLogprob(t, chr(t % 128), bytes([t % 256]), -1.0)) for t in prompt]
    return PromptScored(index, (None, *entries[1:]))


@dataclass
class ScriptedStream:
    """Batches come from `put`, in any thread; `closed` says that the reader has left."""

    engine: ScriptedEngine
    request: Request
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    closed: threading.Event = field(default_factory=threading.Event)
    ended: bool = False

    def __post_init__(self) -> None:
        self.batches: asyncio.Queue[list[Event]] = asyncio.Queue()

    def put(self, *batches: list[Event]) -> None:
        for batch in batches:
            self.loop.call_soon_threadsafe(self.batches.put_nowait, batch)

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while not self.ended:
            batch = await self.batches.get()
            self.ended = isinstance(batch[-1], Ended | Failed)
            yield batch

    def close(self, heard: Callable[[Ended | Failed], None] | None = None, cause: IngotError | None = None) -> None:
        self.engine.running.pop(self.request.id, None)
        self.closed.set()
        if heard is not None and not self.ended:
            final_status = RequestStatus(self.request.id, "prefill", 10, 4, 0, 16, 0.5, 0.0)
            heard(Failed(cause or Cancelled("The client left"), Usage(10, 0, 2), final_status))


class ScriptedKeeping:
    """What an engine says of the prompts it keeps: two hundred bytes, for anyone who asks."""

    def __init__(self) -> None:
        self.cleared: list[str] = []

    def status(self, tenant: str) -> CacheStatus:
        return CacheStatus(1000, 200, 3, CacheTotals(1, 200, 3), 5, 4, 80, 60, (SaltStatus("", 2, 20, 0, 10, 200),))

    def tree(self, tenant: str) -> tuple[CacheBranch, ...]:
        system = CacheBranch(None, "", 0, 12, 4, 120, True, False, 2)
        return system, CacheBranch(0, "", 12, 20, 3, 80, False, True, 0)

    def clear(self, tenant: str) -> int:
        self.cleared.append(tenant)
        return 200

    def export(self, tenant: str, path: Path, secret: bytes, going: Callable[[], bool]) -> int:
        path.write_bytes(b"kept")
        return 20

    def adopt(self, tenant: str, path: Path, secret: bytes, going: Callable[[], bool]) -> int:
        if path.read_bytes() != b"kept":
            raise BadRequest("The file is no archive of kept prefixes.")
        return 20

    def explain(self, request: Request, number: int) -> CacheReport:
        prompt = request.prompts[number]
        return CacheReport(len(prompt), 1, 1, "diverged", prompt[1:4], (120,))


class ScriptedEngine:
    """`script` makes the batches of each request; with None a test puts them by hand."""

    def __init__(
        self,
        script: Script | None = hello,
        *,
        tokenizer: Any = None,
        proposers: tuple[str, ...] = (),
        processor: Any = None,
        specprefill_from: int | None = None,
    ) -> None:
        self.script = script
        self.card = replace(CARD, proposers=proposers, specprefill_from=specprefill_from)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.kept = ScriptedKeeping()
        self.processor = processor
        self.loras: dict[str, LoraRef] = {}
        self.alongside: list[Any] = []  # engines of other models of the server
        self.speculation = SpeculationMetrics()
        self.figures = some_figures()
        self.requests: list[Request] = []
        self.streams: list[ScriptedStream] = []
        self.running: dict[str, ScriptedStream] = {}
        self.refusal: Exception | None = None
        self.opened = threading.Event()
        self.alive = self.ready = True

    async def open(self, request: Request) -> ScriptedStream:
        if self.refusal is not None:
            raise self.refusal
        for prompt in request.prompts:
            if len(prompt) >= CONTEXT:
                raise ContextOverflow(needed=len(prompt) + 1, limit=CONTEXT)
        stream = ScriptedStream(self, request)
        self.requests.append(request)
        self.streams.append(stream)
        self.running[request.id] = stream
        if self.script is not None:
            stream.put(*self.script(request))
        self.opened.set()
        return stream

    def cancel(self, request_id: str) -> bool:
        stream = self.running.pop(request_id, None)
        if stream is None:
            return False
        stream.put([Failed(Cancelled("The request was cancelled"))])
        return True

    def status(self) -> list[RequestStatus]:
        running = [stream.request for stream in self.running.values()]
        return [RequestStatus(one.id, "prefill", 10, 4, 0, 16, 0.5, 0.0, tenant=one.tenant) for one in running]

    def health(self) -> Health:
        return Health(self.alive, self.ready, "ok", 0.01, len(self.running), 0)


def expire_once_open(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of every request passes as soon as the engine has begun it."""
    begun: list[RequestLifetime] = []
    run, open_stream = RequestLifetime.run, engine.open

    async def run_noted(lifetime: RequestLifetime, work: Callable[[], Awaitable[None]]) -> None:
        begun.append(lifetime)
        await run(lifetime, work)

    async def open_late(request: Request) -> ScriptedStream:
        stream = await open_stream(request)
        for lifetime in begun:
            lifetime._scope.deadline = anyio.current_time()
        return stream

    monkeypatch.setattr(RequestLifetime, "run", run_noted)
    monkeypatch.setattr(engine, "open", open_late)


def some_figures() -> EngineMetrics:
    figures = EngineMetrics(CONTEXT, ("stop", "length"), ("unseen", "new_turn"))
    figures.prompt_tokens, figures.generated_tokens, figures.queried_tokens, figures.matched_tokens = 90, 30, 80, 60
    figures.endings["stop"], figures.reasons["unseen"] = 3, 2
    figures.media_queries, figures.media_hits = 6, 2
    figures.occupied, figures.most_tokens, figures.page_tokens = 0.25, 640, 64
    for seconds in (0.02, 0.3, 4000.0):
        figures.first_token_s.add(seconds)
    return figures


def failing(error: IngotError) -> Script:
    return lambda request: [[TextDelta(0, "Hel")], [TextDelta(0, "lo"), Failed(error)]]


class ScriptedTaskEngine:
    """The engine of a model that does not generate; `model` is what it would have loaded."""

    def __init__(self, model: Any) -> None:
        self.model, self.card = model, model.card

    def cancel(self, request_id: str) -> bool:
        return False

    def status(self) -> list[RequestStatus]:
        return []

    def health(self) -> Health:
        return Health(True, True, "ok", 0.01, 0, 0)


def build_app(engine: Any, settings: Settings) -> Starlette:
    """The application of an engine, and of those that it has alongside."""
    return app.build_app(engine, settings, getattr(engine, "alongside", ()))


def settings(**changes: Any) -> Settings:
    return Settings(**{"port": 0, "keepalive_s": 30.0, "responses_store": "off", **changes})
