"""What the endpoints of one model share: its engine, what it serves, what it remembers; and `--warm-prompts`, which are
computed in the background while nobody else wants anything."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import anyio.to_thread

from ingot.config import ModelEntry, Settings
from ingot.config.keys import ArchiveKey
from ingot.engine.request import Failed, ModelCard, Request, Sampling
from ingot.engine.speech_request import Segment, TranscribedText, TranscriptionRequest, UntranscribedAudio
from ingot.errors import ConfigError, ContextOverflow, Forbidden, IngotError
from ingot.http.capture import CaptureFolder
from ingot.http.shared_state import SharedState
from ingot.http.tenants import is_model_allowed
from ingot.http.tracing import open_traces
from ingot.observe.metrics import TaskMetrics
from ingot.protocol.served import AnyServedModel, ServedModel, ServedTaskModel
from ingot.protocol.terms import TaskTerms
from ingot.text.input_files import FilePrompt, read_prompts
from ingot.text.prompt.answer_cache import AnswerCache, AnswerFile, answers_path

if TYPE_CHECKING:
    from ingot.engine.engine import Engine, ModelEngine, PoolingEngine
    from ingot.protocol.chat.answers import GenerationTask


T = TypeVar("T")
CACHED_TRANSCRIPTS = 256


class ModelService:
    """Of a model of any kind. `settings` are those of the model."""

    def __init__(
        self, engine: ModelEngine, served: AnyServedModel, settings: Settings, shared_state: SharedState
    ) -> None:
        self.engine, self.served, self.shared_state = engine, served, shared_state
        self.captures = None if settings.capture is None else CaptureFolder(settings.capture, settings)
        endpoint = settings.otlp_traces_endpoint
        self.traces = None if endpoint is None else open_traces(endpoint)
        self.task_metrics = TaskMetrics()

    def prepare(self) -> None:
        """Do what the first requests would wait for. Takes a while: not for an event loop."""

    def ready(self) -> None:
        """Requests may come: begin what is done while there are none."""

    async def stop(self) -> None:
        if self.captures is not None:
            await anyio.to_thread.run_sync(self.captures.close)
        if self.traces is not None:
            await anyio.to_thread.run_sync(self.traces.close)

    def served_for(self, tenant: str) -> Any:
        """The served model, as this tenant sees it."""
        return replace(self.served, tenant=tenant) if tenant else self.served

    async def read(self, raw: bytes, translate: Callable[[Any], T], tenant: str) -> T:
        """See `SharedState.read`."""
        return await self.shared_state.read(raw, translate, tenant)


def model_identity(card: ModelCard) -> str:
    """Which model it is, whatever it is called here."""
    return "\n".join((card.source, card.family, card.dtype, str(card.weight_bytes)))


class GenerationService(ModelService):
    """Of a model that generates."""

    engine: Engine
    served: ServedModel

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        shared_state: SharedState,
        extend: Callable[[], Callable[[], None]],
        *,
        unloads: bool = False,
    ) -> None:
        """`extend` keeps the engine for work that outlasts its request, until what it returns is called. `unloads`: the
        model is unloaded when nobody asks for it."""
        served = ServedModel.of(engine.card, engine.tokenizer, settings, engine.processor)
        terms = replace(served.terms, unloads=unloads)
        if shared_state.speech_to_text is not None:
            terms = replace(terms, tasks={"audio": TaskTerms(shared_state.speech_to_text.names)})
        super().__init__(engine, replace(served, terms=terms), settings, shared_state)
        self._transcripts: OrderedDict[tuple[str, bytes], TranscribedText] = OrderedDict()
        self.extend = extend
        self._own = settings
        self.refresh_loras()
        if self.shared_state.response_store is not None:
            self.served = replace(self.served, secret=self.shared_state.response_store.secret)
        self._answers = None
        if settings.cache_dir is not None:
            secret = ArchiveKey(settings.archive_key_file.expanduser()).secret()
            path = answers_path(settings.cache_dir, engine.tokenizer, model_identity(engine.card))
            self._answers = AnswerFile(path, secret)
            self.served = replace(self.served, answers=AnswerCache(journal=self._answers))
        self._warm_requests: list[Request] = []
        if settings.warm_prompts is not None:
            self._warm_requests = make_warm_requests(
                settings.warm_prompts, map(self.served_for, self.shared_state.tenants.names)
            )
        self._warming_task: asyncio.Task[None] | None = None

    def refresh_loras(self) -> None:
        """Serve the adapters that the engine has now."""
        self.served = self.served.with_loras(self.engine.loras, self._own.default_lora)

    def prepare(self) -> None:
        self.served.grammars.prepare()

    def ready(self) -> None:
        if self._warm_requests:
            self._warming_task = asyncio.create_task(compute_warm_prompts(self.engine, self._warm_requests))

    async def stop(self) -> None:
        if self._warming_task is not None:
            self._warming_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._warming_task
        self.served.grammars.close()
        await super().stop()
        if self._answers is not None:
            await anyio.to_thread.run_sync(self._answers.close)

    def served_for(self, tenant: str) -> ServedModel:
        return replace(self.served, tenant=tenant) if tenant else self.served

    async def read(self, raw: bytes, translate: Callable[[Any], T], tenant: str) -> T:
        transcribe = None if self.shared_state.speech_to_text is None else self._transcribe
        return await self.shared_state.read(raw, translate, tenant, transcribe)

    async def _transcribe(self, missing: UntranscribedAudio, tenant: str) -> TranscribedText:
        """What is spoken in the audio of a message. The newest are cached, as every turn sends them again."""
        model = self.shared_state.speech_to_text
        assert model is not None
        if not is_model_allowed(model.name, self.shared_state.tenants.key_of(tenant)):
            raise Forbidden(f"This key is not for {model.name}, which would transcribe the audio.", param="messages")
        key = (tenant, missing.digest)
        if key not in self._transcripts:
            deadline = time.monotonic() + self.shared_state.settings.request_timeout_s
            request = TranscriptionRequest(secrets.token_hex(8), missing.audio, tenant=tenant, deadline=deadline)
            async with model.lease() as (service, _):
                stream = service.engine.transcribe(request)
                try:
                    text = "".join([event.text async for event in stream if isinstance(event, Segment)]).strip()
                finally:
                    stream.close()
            self._transcripts[key] = TranscribedText(text)
        self._transcripts.move_to_end(key)
        while len(self._transcripts) > CACHED_TRANSCRIPTS:
            self._transcripts.popitem(last=False)
        return self._transcripts[key]


def open_service(
    engine: ModelEngine, entry: ModelEntry, shared_state: SharedState, extend: Callable[[], Callable[[], None]]
) -> ModelService:
    """The service of a loaded model. Raises ConfigError."""
    unloads = not entry.resident
    if isinstance(engine.card, ModelCard):
        return GenerationService(cast("Engine", engine), entry.settings, shared_state, extend, unloads=unloads)
    served = ServedTaskModel.of(cast("PoolingEngine", engine).model, entry.settings, unloads=unloads)
    return ModelService(engine, served, entry.settings, shared_state)


log = logging.getLogger("ingot.warm")


def make_warm_requests(file: Path, served: Iterable[ServedModel]) -> list[Request]:
    """One for each prompt and tenant; `served` is what each of those is. Raises ConfigError that names what is wrong,
    and where."""
    prompts = read_prompts(file)
    return [warm_request(prompt, one, f"warm-{secrets.token_hex(12)}") for one in served for prompt in prompts]


async def compute_warm_prompts(engine: Engine, requests: Sequence[Request]) -> None:
    """Compute them one after another; what goes wrong with one is logged and keeps nobody waiting."""
    name, tokens = engine.card.name, sum(len(request.prompts[0]) for request in requests)
    log.info("%s: warming %d prompts of %d tokens in all, while nothing else runs", name, len(requests), tokens)
    for request in requests:
        try:
            await _run_warm_request(engine, request)
        except IngotError as error:
            log.warning("%s: a prompt of %d tokens was not warmed: %s", name, len(request.prompts[0]), error.message)
    tenants = {request.tenant for request in requests}
    cached = [await asyncio.to_thread(engine.kept.status, tenant) for tenant in tenants]
    pinned = sum(salt.pinned_tokens for status in cached for salt in status.salts)
    log.info("%s is warm: %d tokens are pinned", name, pinned)


async def _run_warm_request(engine: Engine, request: Request) -> None:
    stream = await engine.open(request)
    try:
        async for events in stream:
            if isinstance(events[-1], Failed):
                raise events[-1].error
    finally:
        stream.close()


WARM_INSTRUCTIONS: Final = ("system", "developer")
WARM_FOLLOWING: Final = {"role": "user", "content": "."}


def warm_request(prompt: FilePrompt, served: ServedModel, request_id: str) -> Request:
    """What computes and pins a prompt, up to where the text begins that will differ.

    Raises ConfigError that names the prompt's place in its file.
    """
    try:
        job, length = read_warm_body(warm_prompt_body(prompt.value), served, request_id)
        tokens = job.request.prompts[0][:length]
        if len(tokens) >= served.card.context:
            raise ContextOverflow(needed=len(tokens) + 1, limit=served.card.context)
    except IngotError as error:
        raise ConfigError(f"{prompt.place}: {error.message}") from error
    return Request(
        id=request_id,
        prompts=(tokens,),
        max_tokens=1,
        sampling=Sampling(temperature=0.0),
        salt=job.request.salt,
        lora=job.request.lora,
        tenant=served.tenant,
        pin=True,
        background=True,
        marks=tuple(tuple(mark for mark in marks if mark <= len(tokens)) for marks in job.request.marks),
        media=tuple(tuple(item for item in items if item.end <= len(tokens)) for items in job.request.media),
    )


def warm_prompt_body(value: Any) -> dict[str, Any]:
    """A text is a system prompt, a list is a conversation."""
    if isinstance(value, str):
        value = [{"role": "system", "content": value}]
    return {"messages": value} if isinstance(value, list) else dict(value)


def read_warm_body(body: dict[str, Any], served: ServedModel, request_id: str) -> tuple[GenerationTask, int | None]:
    """The job of a body, and how many tokens of its prompt are the body's own."""
    from ingot.protocol.openai.chat import read_chat
    from ingot.protocol.openai.completions import read_completion

    messages = body.get("messages")
    if not isinstance(messages, list):
        return read_completion(body, served, request_id), None
    body = {**body, "add_generation_prompt": False}
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") not in WARM_INSTRUCTIONS:
        return read_chat(body, served, request_id), None
    # Many templates refuse a conversation in which nobody speaks. What the user will say begins where this one does.
    job = read_chat({**body, "messages": [*messages, WARM_FOLLOWING]}, served, request_id)
    assert job.head is not None and job.head.source is not None
    spans = job.head.source.prompts[0].spans
    return job, next((span.begin for span in spans if span.message == len(messages)), None)
