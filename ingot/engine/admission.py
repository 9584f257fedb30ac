"""Admission: refuses what can be refused at once, limits the queue, and turns requests into active requests.

Any thread may call it. It raises BadRequest, ContextOverflow, Unsupported, ModelNotFound or Overloaded. What takes long
for long prompts or many answers is done outside of the lock. Each tenant has an equal share of the queue; unused shares
are lent to others. A tenant below its share is admitted even where the others fill the queue.

`ServedLoras` are the LoRA adapters that requests may name. Any thread may read `named`; the engine thread loads and
unloads them, between two steps. An unloaded adapter stays in memory for the requests that run with it.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import mlx.core as mx

from ingot.cache.forward_batch import ForwardPart
from ingot.config import Settings
from ingot.engine.output import ActiveRequest
from ingot.engine.request import LoraRef, ModelCard, Request
from ingot.engine.sequence import PromptMedia, TokenSequence
from ingot.engine.streams import EventSink
from ingot.engine.vision_encoder import VisionEncoder
from ingot.errors import AdapterError, BadRequest, ContextOverflow, ModelNotFound, Overloaded, Unsupported
from ingot.models.adapter import ModelAdapter
from ingot.models.lora.weights import LoraWeights, read_lora
from ingot.shares import Shares
from ingot.text.tokenizer.tokenizer import Tokenizer, TranslatePrompt

log = logging.getLogger("ingot.engine")

FIRST_MARKS, LAST_MARKS = 2, 8
"""Message ends at which checkpoints are taken: after the system prompt and the first message, and the newest."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    max_sequences: int = 32
    max_queue: int = 256
    target_itl_ms: float = 100.0

    @classmethod
    def of(cls, settings: Settings) -> EngineLimits:
        return cls(settings.max_sequences, settings.max_queue, settings.target_itl_ms)


class Admission:
    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        free_sequences: Callable[[], int],
        vision_encoder: VisionEncoder | None = None,
        loras: ServedLoras | None = None,
        translate: TranslatePrompt | None = None,
    ) -> None:
        """`free_sequences` gives the free slots of the batch, whose sequences need not queue. `translate` retokenizes
        prompts for a SpecPrefill scorer with another tokenizer."""
        self._vision_encoder, self._loras, self._translate = vision_encoder, loras, translate
        self._card, self._tokenizer, self._limits, self._free_sequences = card, tokenizer, limits, free_sequences
        self.jobs: dict[str, ActiveRequest] = {}
        self._queued = Shares("queue", limits.max_queue)  # sequences that have not run yet
        self._entering = 0  # of those, the ones whose `ActiveRequest` is being made
        self._tickets = itertools.count()
        self._mean_request_s = 1.0
        self.refused = 0  # requests that found the queue full
        self._lock = threading.Lock()

    def enter(self, request: Request, reader: EventSink) -> ActiveRequest:
        """Raises BadRequest, ContextOverflow or Overloaded."""
        self._validate(request)
        count = len(request.prompts) * request.n
        with self._lock:
            self._refuse_if_full(request, count)
            self._queued.add(request.tenant, count)
            self._entering += count
        job: ActiveRequest | None = None
        try:
            job = ActiveRequest(request, reader, self._sequences(request), self._tokenizer)
        finally:
            with self._lock:
                self._entering -= count
                if job is None or request.id in self.jobs:
                    self._queued.add(request.tenant, -count)
                else:
                    self.jobs[request.id] = job
        if self.jobs.get(request.id) is not job:
            raise BadRequest(f"A request with the id {request.id} is already running")
        return job

    def began(self, sequences: Sequence[TokenSequence]) -> None:
        """Sequences run for the first time."""
        with self._lock:
            for sequence in sequences:
                self._queued.add(sequence.request.tenant, -1)

    def left(self, sequence: TokenSequence) -> None:
        """A sequence ended, waiting or running."""
        if sequence.admitted_at is None:
            with self._lock:
                self._queued.add(sequence.request.tenant, -1)

    def close(self, request_id: str) -> ActiveRequest | None:
        """Remove a request; None where it was not there."""
        with self._lock:
            return self.jobs.pop(request_id, None)

    def took(self, seconds: float) -> None:
        """How long a finished request took."""
        self._mean_request_s += 0.1 * (seconds - self._mean_request_s)

    def check(self) -> None:
        with self._lock:
            if not self.jobs:
                assert self._queued.total == self._entering, "the queue's count is wrong"

    def _refuse_if_full(self, request: Request, count: int) -> None:
        most = self._limits.max_queue
        if count > most + self._limits.max_sequences:
            raise BadRequest(
                f"The request asks for {count} answers; at most {most + self._limits.max_sequences} run and wait "
                "at once",
                param="n" if request.n > 1 else "prompt",
            )
        tenants = (job.request.tenant for job in self.jobs.values())
        if not self._queued.fits(request.tenant, count, spare=self._free_sequences(), sharing=tenants):
            self.refused += 1
            message = f"The queue is full: {self._queued.total} sequences wait, at most {most} may"
            raise Overloaded(message, retry_after=self._retry_after())

    def _retry_after(self) -> float:
        return min(60.0, max(1.0, self._mean_request_s * self._queued.total / self._limits.max_sequences))

    def _validate(self, request: Request) -> None:
        context, vocab = self._card.context_of(exact=request.exact), self._card.vocab
        if self._loras is not None:
            self._loras.refuse(request)
        elif request.lora is not None:
            raise lora_gone_error(request.lora)
        if request.specprefill is not None:
            self._refuse_specprefill(request)
        if any(request.media) and self._vision_encoder is None:
            raise Unsupported(
                f"{self._card.name} takes text alone: it is served without a vision encoder", param="messages"
            )
        if self._vision_encoder is not None:
            self._vision_encoder.refuse(request.media)
            if (
                self._vision_encoder.tower.bidirectional
                and any(request.media)
                and request.sampling.prompt_logprobs is not None
            ):
                raise Unsupported(
                    f"prompt_logprobs is not available with images: {self._card.name} attends to both sides",
                    param="prompt_logprobs",
                )
        for prompt in request.prompts:
            if not prompt:
                raise BadRequest("The prompt is empty: it has no tokens", param="prompt")
            least = min(1, request.max_tokens) if request.max_tokens is not None else 1
            if len(prompt) + least > context:
                raise ContextOverflow(needed=len(prompt) + least, limit=context)
            if max(prompt) >= vocab or min(prompt) < 0:
                raise BadRequest(f"The prompt holds a token outside the vocabulary of {vocab}", param="prompt")

    def _refuse_specprefill(self, request: Request) -> None:
        if not self._card.scorer:
            raise Unsupported(
                "This server has no SpecPrefill scorer. Start it with --specprefill.",
                param="specprefill",
            )
        if request.exact:
            raise BadRequest(
                "cache is exact, but specprefill computes only a part of the prompt: choose one", param="specprefill"
            )

    def _sequences(self, request: Request) -> list[TokenSequence]:
        stop_tokens = request.stop.token_ids | (frozenset() if request.stop.ignore_eos else self._tokenizer.eos_ids)
        seed = request.sampling.seed if request.sampling.seed is not None else random.getrandbits(63)
        sequences = []
        for number, prompt in enumerate(request.prompts):
            room = self._card.context_of(exact=request.exact) - len(prompt)
            limit = room if request.max_tokens is None else min(request.max_tokens, room)
            marks = self._message_ends(request, number)
            items = request.media[number] if request.media else ()
            translated = (
                self._translate(prompt) if request.specprefill is not None and self._translate is not None else None
            )
            for choice in range(request.n):
                # Answers of one request differ; the first is what a request for one answer would get.
                own_seed = seed + choice * 0x9E3779B9
                index = number * request.n + choice
                sequence = TokenSequence(request, index, next(self._tickets), prompt, limit, own_seed, stop_tokens)
                sequence.marks, sequence.translated = marks, translated
                if items and self._vision_encoder is not None:
                    sequence.prompt_media = PromptMedia.of(prompt, items, self._vision_encoder.tower)
                sequences.append(sequence)
        return sequences

    def _message_ends(self, request: Request, number: int) -> frozenset[int]:
        """By default after EOS tokens, with which templates end messages: the next turn differs only after one."""
        ends: Sequence[int] = request.marks[number] if request.marks else ()
        if not request.marks:
            eos_ids, prompt = self._tokenizer.eos_ids, request.prompts[number]
            ends = [length for length, token in enumerate(prompt, start=1) if token in eos_ids]
        return frozenset([*ends[:FIRST_MARKS], *ends[-LAST_MARKS:]])


class ServedLoras:
    def __init__(self, model: ModelAdapter, *, most: int, most_rank: int, room: int | None = None) -> None:
        """At most `most` adapters of at most rank `most_rank`, which take at most `room` bytes in all."""
        self._model, self._room = model, room
        self.most, self.most_rank = most, most_rank
        self.named: Mapping[str, LoraRef] = MappingProxyType({})
        self._unloading: set[str] = set()  # digests of adapters that have no name any more

    # For any thread

    def refuse(self, request: Request) -> None:
        """Raises ModelNotFound where a request names an adapter that is not loaded."""
        lora = request.lora
        if lora is not None and self.named.get(lora.name) != lora:
            raise lora_gone_error(lora)

    # The engine thread's

    @property
    def nbytes(self) -> int:
        return self._model.loras.nbytes

    def load(self, name: str, folder: Path) -> LoraRef:
        """Raises AdapterError."""
        if name in self.named:
            raise AdapterError(f"There is an adapter {name!r} already: unload it first.", param="lora_name")
        if len(self.named) >= self.most:
            raise AdapterError(f"There are {self.most} adapters already, which is the most (--max-loras).")
        loaded = self._digests
        weights = load_lora(self._model, folder, most_rank=self.most_rank)
        if self._room is not None and self.nbytes > self._room:
            if weights.digest not in loaded:
                self._model.loras.drop(weights.digest)
            raise AdapterError("It does not fit into the memory for adapters: raise --max-loras or --max-lora-rank.")
        self._unloading.discard(weights.digest)
        lora = LoraRef(name, weights.digest, weights.rank)
        self.named = MappingProxyType({**self.named, name: lora})
        log.info("adapter %s is loaded: rank %d, for %d layers", name, weights.rank, len(weights.pairs))
        return lora

    def unload(self, name: str) -> None:
        """Requests can no longer name it; `drop_unused` frees its memory. Raises ModelNotFound."""
        if name not in self.named:
            listed = ", ".join(f"'{each}'" for each in self.named) or "none"
            raise ModelNotFound(f"There is no adapter '{name[:200]}' here. Loaded: {listed}.", param="lora_name")
        digest = self.named[name].digest
        self.named = MappingProxyType({each: lora for each, lora in self.named.items() if each != name})
        if digest not in self._digests:
            self._unloading.add(digest)
        log.info("adapter %s is unloaded", name)

    def drop_unused(self, jobs: Iterable[ActiveRequest]) -> None:
        if self._unloading:
            used = {job.request.lora.digest for job in jobs if job.request.lora is not None}
            for digest in self._unloading - used:
                self._model.loras.drop(digest)
            self._unloading &= used

    def holds(self, request: Request) -> bool:
        """Whether a request's adapter, if it has one, is in memory."""
        return request.lora is None or request.lora.digest in self._model.loras

    @property
    def _digests(self) -> set[str]:
        return {lora.digest for lora in self.named.values()}


def lora_gone_error(lora: LoraRef) -> ModelNotFound:
    return ModelNotFound(f"The adapter '{lora.name}' is not loaded any more.", param="model")


TRIAL_TOKENS = 3


def load_lora(model: ModelAdapter, folder: Path, *, most_rank: int) -> LoraWeights:
    """Read an adapter and give it a slot, unless it has one. Raises AdapterError, and leaves the model as it was."""
    weights = read_lora(folder)
    if weights.rank > most_rank:
        raise AdapterError(f"Its rank is {weights.rank}, more than the {most_rank} that this server was started for.")
    if model.tower is not None and model.tower.bidirectional:
        raise AdapterError("Image tokens of this model see each other, which is not supported with adapters.")
    if weights.digest not in model.loras:
        model.loras.add(weights)
        try:
            _try_lora(model, weights.digest)
        except BaseException:
            model.loras.drop(weights.digest)
            raise
    return weights


def _try_lora(model: ModelAdapter, digest: str) -> None:
    rows = model.new_batch_state()
    row = rows.new(lora=model.loras.slot(digest))
    try:
        for tokens in (TRIAL_TOKENS, 1):
            mx.eval(model.run(rows, mx.zeros(tokens, mx.uint32), [ForwardPart((row,), tokens)]), rows.pending())
    except ValueError as error:
        raise AdapterError(f"This model cannot be adapted so: {error}.") from error
    finally:
        rows.leave(row)
    unused_layers = model.loras.unused_lora_layers(digest)
    if unused_layers:
        raise AdapterError(f"This model uses the weights of {unused_layers[0]} by code that adapters cannot extend.")
