"""Pooling (embeddings and rerank scores) as a workload of the engine's loop: who waits, and how much runs between
steps.

Pure Python over the `PoolingModel` protocol: no mlx, tested without it. The contract:
- Any thread may call `encode`, `accept`, `cancel` and `status`; the rest is the engine thread's.
- `advance` works for a bounded time, at most one batch, in parts that the model bounds.
- A request ends exactly once: with its numbers, or with the error that ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ingot.engine.loop import REQUEST_FAILED, PostMessage
from ingot.engine.request import PoolingModelCard, PoolingOutput, PoolingRequest, RequestStatus
from ingot.engine.step_costs import CostLine
from ingot.engine.time_slicing import TimeSlicedWorkload, deliver
from ingot.errors import BadRequest, IngotError, InputTooLong
from ingot.kernels.device import is_device_lost
from ingot.text.tokenizer.encoder_inputs import TOO_LONG_REMEDY, RerankInputs, TextInputs

PADDING_SHARE = 0.25
"""Texts are computed together when their lengths differ from the first one's by no more than this part of it..."""
PADDING_TOKENS = 16
"""...or by no more than this many tokens, as very short ones always do."""

PooledRow: TypeAlias = "array[float]"
OnPoolingOutput = Callable[[PoolingOutput | IngotError], None]


class PoolingModel(Protocol):
    """An encoder, as the loop sees it."""

    def run(
        self, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]]
    ) -> Generator[None, None, list[PooledRow]]:
        """Compute a batch, part by part; the end's value has one row an input."""
        ...

    def rest(self) -> None:
        """Give back scratch memory."""
        ...


@dataclass(frozen=True, slots=True)
class ServedPoolingModel:
    """A loaded encoder: its card, and how texts become its inputs."""

    card: PoolingModelCard
    inputs: TextInputs | RerankInputs
    model: PoolingModel


@dataclass(eq=False, slots=True)
class RunningPooling:
    """A request while it runs. `waiting` are the indices of inputs that are not yet computed, the longest first."""

    request: PoolingRequest
    reply: OnPoolingOutput
    waiting: list[int] = field(default_factory=list)
    rows: list[PooledRow | None] = field(default_factory=list)
    began: float | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        inputs = self.request.inputs
        self.waiting = sorted(range(len(inputs)), key=lambda index: (-len(inputs[index].tokens), index))
        self.rows = [None] * len(inputs)

    def length(self, index: int) -> int:
        return len(self.request.inputs[index].tokens)

    @property
    def remaining(self) -> int:
        """Tokens of the inputs that are not yet begun."""
        return sum(self.length(index) for index in self.waiting)

    @property
    def computed(self) -> int:
        return sum(self.length(index) for index, row in enumerate(self.rows) if row is not None)


@dataclass(frozen=True, slots=True)
class BatchedInput:
    """One input of a request, in a batch."""

    job: RunningPooling
    index: int


@dataclass(slots=True)
class PoolingBatch:
    inputs: list[BatchedInput]
    work: Generator[None, None, list[PooledRow]]
    spent: float = 0.0

    @property
    def padded_tokens(self) -> int:
        return len(self.inputs) * max(each.job.length(each.index) for each in self.inputs)


def pooling_urgency(job: RunningPooling, cost_ms: float, now: float) -> tuple[float, float]:
    """Sorts requests, the most urgent first.

    The least work goes first, but a second of age weighs as much as a second of work, so that a question gets past a
    library that is being indexed and the library still gets done.
    """
    return cost_ms - 1000 * (now - job.request.arrived), job.request.arrived


def pick_batch(jobs: Sequence[RunningPooling], budget: int) -> list[BatchedInput]:
    """The inputs to compute together: the longest of the first request, and what is about as long, of it and the
    others.

    They take at most `budget` tokens with their padding, but one is always among them.
    """
    first = width = jobs[0].length(jobs[0].waiting[0])
    most_apart = max(PADDING_SHARE * first, PADDING_TOKENS)
    inputs: list[BatchedInput] = []
    for job in jobs:
        for index in job.waiting:
            length = job.length(index)
            if abs(length - first) > most_apart:
                continue
            if inputs and (len(inputs) + 1) * max(width, length) > budget:
                return inputs
            width = max(width, length)
            inputs.append(BatchedInput(job, index))
    return inputs


log = logging.getLogger("ingot.engine")

UNMEASURED_TOKENS = 512
"""Size of a batch as long as nobody knows what one costs."""


class PoolingWorkload(TimeSlicedWorkload[RunningPooling]):
    """The requests for one pooling model."""

    name = "pooling"
    items, shares = "requests for encoders", "encodings"
    _served: ServedPoolingModel

    def __init__(
        self,
        served: ServedPoolingModel,
        post: PostMessage,
        max_queue: int,
        target_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(served, post, max_queue, target_ms, clock)
        self._cost = CostLine()
        self._batch: PoolingBatch | None = None

    # For any thread

    async def encode(self, request: PoolingRequest) -> PoolingOutput:
        """Wait for the numbers. Raises before any work what can be known then; a cancelled wait ends the work."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[PoolingOutput] = loop.create_future()

        def settle(result: PoolingOutput | IngotError) -> None:
            if answer.done():
                return
            if isinstance(result, IngotError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def reply(result: PoolingOutput | IngotError) -> None:
            # A loop that is closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result)

        # Millions of tokens take a while to look at, which must not hold up the loop.
        await asyncio.to_thread(self._validate, request)
        self._admit(RunningPooling(request, reply))
        try:
            return await answer
        finally:
            self.cancel(request.id)

    def accept(self, request: PoolingRequest, reply: OnPoolingOutput) -> None:
        """Queue a request from a plain thread. `reply` is called once, from the engine thread."""
        self._validate(request)
        self._admit(RunningPooling(request, reply))

    def status(self, now: float) -> list[RequestStatus]:
        return [
            RequestStatus(
                id=job.request.id,
                phase="queued" if job.began is None else "prefill",
                prompt_tokens=job.request.tokens,
                prefilled_tokens=job.computed,
                age_s=now - job.request.arrived,
                tenant=job.request.tenant,
            )
            for job in list(self._jobs.values())
        ]

    def _validate(self, request: PoolingRequest) -> None:
        card = self._served.card
        if not request.inputs:
            raise BadRequest("There is no input", param="input")
        for piece in request.inputs:
            if not piece.tokens:
                raise BadRequest("An input is empty: it has no tokens", param="input")
            if len(piece.tokens) > card.length:
                raise InputTooLong(needed=len(piece.tokens), limit=card.length, remedy=TOO_LONG_REMEDY)
            if max(piece.tokens) >= card.vocab or min(piece.tokens) < 0:
                raise BadRequest(f"An input holds a token outside the vocabulary of {card.vocab}", param="input")

    def _retry_after(self) -> float:
        waiting = sum(self._cost_ms(job.remaining) for job in self._jobs.values() if not job.ended)
        return min(60.0, max(1.0, waiting / 1000))

    # The engine thread

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def work(self, milliseconds: float) -> None:
        """For about that long: begin a batch or go on with the one that is begun, and stop at its end."""
        if self._batch is None:
            self._batch = self._begin(milliseconds)
        batch = self._batch
        if batch is None:
            return
        try:
            rows = self._go_on(batch, milliseconds)
            if rows is not None:
                self._batch = None
                self._deliver(batch, rows)
        # A model or a device may fail in ways nobody foresaw; the requests at hand fail, the server goes on.
        except Exception as error:
            if is_device_lost(error):
                raise
            log.exception("an encoder failed; the requests in its batch are given up")
            self._batch = None
            for each in batch.inputs:
                self._end(each.job.request.id, IngotError(REQUEST_FAILED))

    def reset_after_fault(self, error: IngotError) -> None:
        """After a fault that no batch answers for."""
        self._batch = None
        self.abandon(error)

    def check(self) -> None:
        """Raises AssertionError if anything was lost or is held by nobody."""
        jobs = list(self._jobs.values())
        assert all(not job.ended for job in jobs), "a request that has ended is still listed"
        assert all(None in job.rows for job in jobs), "a request is complete and was not answered"
        running = self._batch.inputs if self._batch is not None else []
        for job in jobs:
            missing = {index for index, row in enumerate(job.rows) if row is None}
            batched = {each.index for each in running if each.job is job}
            assert missing == set(job.waiting) | batched, "an input was lost"
        if not jobs:
            assert self._batch is None, "idle, but a batch is held"

    def _go_on(self, batch: PoolingBatch, milliseconds: float) -> list[PooledRow] | None:
        """Go on with a batch; its rows where that ended it."""
        began = self._clock()
        try:
            while True:
                next(batch.work)
                if (self._clock() - began) * 1000 >= milliseconds:
                    return None
        except StopIteration as ended:
            found: list[PooledRow] = ended.value
            return found
        finally:
            batch.spent += self._clock() - began

    def _begin(self, milliseconds: float) -> PoolingBatch | None:
        now = self._clock()
        waiting = [job for job in list(self._jobs.values()) if job.waiting]
        if not waiting:
            return None
        waiting.sort(key=lambda job: pooling_urgency(job, self._cost_ms(job.remaining), now))
        inputs = pick_batch(waiting, self._budget(milliseconds))
        for each in inputs:
            each.job.waiting.remove(each.index)
            each.job.began = each.job.began or now
        pieces = [each.job.request.inputs[each.index] for each in inputs]
        self._used = True
        work = self._served.model.run([p.tokens for p in pieces], [p.types for p in pieces])
        return PoolingBatch(inputs, work)

    def _budget(self, milliseconds: float) -> int:
        most = self._served.card.batch_tokens
        if not self._cost.known:
            return min(most, UNMEASURED_TOKENS)
        return max(1, int(min(most, max(self._cost.size_for(milliseconds), 1.0))))

    def _cost_ms(self, tokens: int) -> float:
        return self._cost.cost(tokens) if self._cost.known else float(tokens)

    def _deliver(self, batch: PoolingBatch, rows: list[PooledRow]) -> None:
        self._cost.observe(batch.padded_tokens, 1000 * batch.spent)
        for each, row in zip(batch.inputs, rows, strict=True):
            if not math.isfinite(sum(row)):
                self._end(each.job.request.id, IngotError("The model answers with what is not a number"))
            each.job.rows[each.index] = row
        for job in dict.fromkeys(each.job for each in batch.inputs):
            if not job.ended and None not in job.rows:
                self._close(job)

    def _close(self, job: RunningPooling) -> None:
        now = self._clock()
        began = job.began if job.began is not None else now
        rows = tuple(row for row in job.rows if row is not None)
        queue_s = max(0.0, began - job.request.arrived)
        self._end(job.request.id, PoolingOutput(rows, job.request.tokens, queue_s=queue_s, compute_s=now - began))

    def _end(self, request_id: str, result: PoolingOutput | IngotError) -> None:
        job = self._remove(request_id)
        if job is None:
            return
        job.ended = True
        job.waiting = []
        deliver(request_id, job.reply, result)
        if self._batch is not None and all(each.job.ended for each in self._batch.inputs):
            self._batch.work.close()
            self._batch = None
