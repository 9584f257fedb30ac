"""The way in: refuses what can be refused at once, counts who waits, and makes jobs of requests.

Any thread may call it. What takes long for long prompts or many answers is done outside of the lock.

Each tenant has an equal share of the queue. What others leave of theirs is lent, so that one alone has all of it; who
has less than its share waiting is let in also where the others have taken everything.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from ingot.engine.jobs import Job
from ingot.engine.loras import NamedLoras, gone
from ingot.engine.model_card import ModelCard
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.sight import Sight
from ingot.engine.streams import EventSink
from ingot.engine.vision_encoder import Eyes
from ingot.errors import BadRequest, ContextOverflow, Overloaded, Unsupported
from ingot.shares import Shares
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tokens.translation import Translate

FIRST_MARKS, LAST_MARKS = 2, 8
"""Messages' ends at which checkpoints are taken: behind the system prompt and the first message, and the newest."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_sequences: int = 32
    max_queue: int = 256
    target_itl_ms: float = 100.0


class Door:
    def __init__(
        self,
        card: ModelCard,
        tokenizer: Tokenizer,
        limits: Limits,
        free_seats: Callable[[], int],
        eyes: Eyes | None = None,
        loras: NamedLoras | None = None,
        translate: Translate | None = None,
    ) -> None:
        """`free_seats` says how many sequences could run that do not: those do not have to wait. `eyes` are what the
        model sees with, `loras` the adapters beside it; `translate` tells prompts to a scorer that has other tokens."""
        self._eyes, self._loras, self._translate = eyes, loras, translate
        self._card, self._tokenizer, self._limits, self._free_seats = card, tokenizer, limits, free_seats
        self.jobs: dict[str, Job] = {}
        self._queued = Shares("queue", limits.max_queue)  # sequences let in and not yet running for the first time
        self._entering = 0  # of those, the ones whose jobs are being made
        self._tickets = itertools.count()
        self._mean_request_s = 1.0
        self.refused = 0  # requests that found the queue full
        self._lock = threading.Lock()

    def enter(self, request: Request, reader: EventSink) -> Job:
        """Raises BadRequest, ContextOverflow or Overloaded."""
        self._validate(request)
        count = len(request.prompts) * request.n
        with self._lock:
            self._refuse_if_full(request, count)
            self._queued.add(request.tenant, count)
            self._entering += count
        job: Job | None = None
        try:
            job = Job(request, reader, self._sequences(request), self._tokenizer)
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

    def began(self, sequences: Many[Sequence]) -> None:
        """They run, each for the first time."""
        with self._lock:
            for sequence in sequences:
                self._queued.add(sequence.request.tenant, -1)

    def left(self, sequence: Sequence) -> None:
        """It ended, wherever it was."""
        if sequence.admitted_at is None:
            with self._lock:
                self._queued.add(sequence.request.tenant, -1)

    def close(self, request_id: str) -> Job | None:
        """Its job is no longer known; None where it was not."""
        with self._lock:
            return self.jobs.pop(request_id, None)

    def took(self, seconds: float) -> None:
        """How long a request took that came to its end."""
        self._mean_request_s += 0.1 * (seconds - self._mean_request_s)

    def check(self) -> None:
        with self._lock:
            if not self.jobs:
                assert self._queued.total == self._entering, "the queue's count is off"

    def _refuse_if_full(self, request: Request, count: int) -> None:
        most = self._limits.max_queue
        if count > most + self._limits.max_sequences:
            raise BadRequest(
                f"The request asks for {count} answers; at most {most + self._limits.max_sequences} run and wait "
                "at once",
                param="n" if request.n > 1 else "prompt",
            )
        here = (job.request.tenant for job in self.jobs.values())
        if not self._queued.fits(request.tenant, count, spare=self._free_seats(), sharing=here):
            self.refused += 1
            told = f"The queue is full: {self._queued.total} sequences wait, at most {most} may"
            raise Overloaded(told, retry_after=self._retry_after())

    def _retry_after(self) -> float:
        return min(60.0, max(1.0, self._mean_request_s * self._queued.total / self._limits.max_sequences))

    def _validate(self, request: Request) -> None:
        context, vocab = self._card.context_of(exact=request.exact), self._card.vocab
        if self._loras is not None:
            self._loras.refuse(request)
        elif request.lora is not None:
            raise gone(request.lora)
        if request.sparse is not None:
            self._refuse_sparse(request)
        if any(request.media) and self._eyes is None:
            raise Unsupported(f"{self._card.name} is run on text alone: it has no vision tower here", param="messages")
        if self._eyes is not None:
            self._eyes.refuse(request.media)
            if self._eyes.tower.mutual and any(request.media) and request.sampling.prompt_logprobs is not None:
                raise Unsupported(
                    f"{self._card.name} reads a picture's tokens all at once: there are no prompt_logprobs beside one",
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

    def _refuse_sparse(self, request: Request) -> None:
        if not self._card.scorer:
            raise Unsupported(
                "This server computes prompts whole: it has nobody to score them. Start it with --specprefill.",
                param="specprefill",
            )
        if request.exact:
            raise BadRequest(
                "cache is exact, and specprefill computes a part of the prompt: choose one", param="specprefill"
            )

    def _sequences(self, request: Request) -> list[Sequence]:
        stop_tokens = request.stop.token_ids | (frozenset() if request.stop.ignore_eos else self._tokenizer.eos_ids)
        seed = request.sampling.seed if request.sampling.seed is not None else random.getrandbits(63)
        made = []
        for number, prompt in enumerate(request.prompts):
            room = self._card.context_of(exact=request.exact) - len(prompt)
            limit = room if request.max_tokens is None else min(request.max_tokens, room)
            marks = self._message_ends(request, number)
            items = request.media[number] if request.media else ()
            translated = self._translate(prompt) if request.sparse is not None and self._translate is not None else None
            for choice in range(request.n):
                # Answers of one request differ, and the first one is what a request for a single one gives.
                own_seed = seed + choice * 0x9E3779B9
                index = number * request.n + choice
                sequence = Sequence(request, index, next(self._tickets), prompt, limit, own_seed, stop_tokens)
                sequence.marks, sequence.translated = marks, translated
                if items and self._eyes is not None:
                    sequence.sight = Sight.of(prompt, items, self._eyes.tower)
                made.append(sequence)
        return made

    def _message_ends(self, request: Request, number: int) -> frozenset[int]:
        """As the request says. Else, templates end messages with a token that also ends answers; the next turn differs
        only after one."""
        ends: Many[int] = request.marks[number] if request.marks else self._ends(request.prompts[number])
        return frozenset([*ends[:FIRST_MARKS], *ends[-LAST_MARKS:]])

    def _ends(self, prompt: Many[int]) -> list[int]:
        ending = self._tokenizer.eos_ids
        return [place for place, token in enumerate(prompt, start=1) if token in ending]
