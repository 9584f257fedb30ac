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
import threading
import time
from collections.abc import Callable, Mapping

from ingot.engine.loop import REQUEST_FAILED, PostMessage
from ingot.engine.pooling_batches import (
    OnPoolingOutput,
    PooledRow,
    PoolingBatch,
    RunningPooling,
    ServedPoolingModel,
    pick_batch,
    pooling_urgency,
)
from ingot.engine.request import Phase, PoolingOutput, PoolingRequest, PoolingTask, RequestStatus
from ingot.engine.step_costs import CostLine
from ingot.engine.time_slicing import TimeSlicedWorkload
from ingot.errors import BadRequest, Cancelled, IngotError, InputTooLong, Overloaded
from ingot.kernels.device import is_device_lost
from ingot.shares import Shares
from ingot.text.tokenizer.encoder_inputs import TOO_LONG_REMEDY

log = logging.getLogger("ingot.engine")

UNMEASURED_TOKENS = 512
"""Size of a batch as long as nobody knows what one costs."""


class PoolingWorkload(TimeSlicedWorkload):
    """All encodings under way."""

    name = "the encoders"

    def __init__(
        self,
        encoders: Mapping[PoolingTask, ServedPoolingModel],
        post: PostMessage,
        max_queue: int,
        target_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` puts something into the engine thread's mailbox; `target_ms` is the time wanted between two tokens."""
        self._encoders, self._post, self._clock = encoders, post, clock
        self._target_ms = target_ms
        # One may always be computed, besides those that wait.
        self._queued = Shares("encodings", max_queue + 1)
        self._jobs: dict[str, RunningPooling] = {}
        self._lock = threading.Lock()
        self._costs = {role: CostLine() for role in encoders}
        self._batch: PoolingBatch | None = None
        self._used: set[PoolingTask] = set()

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
        self._queue(request, reply)
        try:
            return await answer
        finally:
            self.cancel(request.id)

    def accept(self, request: PoolingRequest, reply: OnPoolingOutput) -> None:
        """Queue a request from a plain thread. `reply` is called once, from the engine thread."""
        self._validate(request)
        self._queue(request, reply)

    def _queue(self, request: PoolingRequest, reply: OnPoolingOutput) -> None:
        with self._lock:
            if request.id in self._jobs:
                raise BadRequest(f"A request with the id {request.id} is already running")
            if not self._queued.fits(request.tenant, 1):
                most = self._queued.capacity - 1
                raise Overloaded(
                    f"The queue is full: {len(self._jobs)} requests for encoders wait, at most {most} may",
                    retry_after=self._retry_after(),
                )
            self._queued.add(request.tenant, 1)
            self._jobs[request.id] = RunningPooling(request, reply)
        self._post(lambda: None)  # wakes an idle engine

    def cancel(self, request_id: str) -> bool:
        """End an encoding, wherever it is. False if there is none of that id."""
        if request_id not in self._jobs:
            return False
        self._post(lambda: self._end(request_id, Cancelled("The request was cancelled")))
        return True

    def status(self, now: float) -> list[RequestStatus]:
        return [
            RequestStatus(
                id=job.request.id,
                phase="queued" if job.began is None else "prefill",
                prompt_tokens=job.request.tokens,
                prefilled_tokens=job.computed,
                completion_tokens=0,
                max_tokens=0,
                age_s=now - job.request.arrived,
                tokens_per_second=0.0,
                tenant=job.request.tenant,
            )
            for job in list(self._jobs.values())
        ]

    def phases(self, role: PoolingTask) -> list[Phase]:
        """Of the encodings for one of the encoders."""
        jobs = [job for job in list(self._jobs.values()) if job.request.role == role]
        return ["queued" if job.began is None else "prefill" for job in jobs]

    def _validate(self, request: PoolingRequest) -> None:
        card = self._encoders[request.role].card
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
        waiting = sum(self._cost_ms(job.request.role, job.remaining) for job in self._jobs.values() if not job.ended)
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
            for share in batch.shares:
                self._end(share.encoding.request.id, IngotError(REQUEST_FAILED))

    def rest(self) -> None:
        """Nothing runs: see that nothing was lost, and give back what running took."""
        self.check()
        for role in self._used:
            self._encoders[role].model.rest()
        self._used.clear()

    def reset_after_fault(self, error: IngotError) -> None:
        """After a fault that no batch answers for."""
        self._batch = None
        self.abandon(error)

    def close(self) -> None:
        """Nothing is held but by encodings, which have ended."""

    def check(self) -> None:
        """Raises AssertionError if anything was lost or is held by nobody."""
        jobs = list(self._jobs.values())
        assert all(not job.ended for job in jobs), "an ended encoding is still listed"
        assert all(None in job.rows for job in jobs), "an encoding is complete and was not delivered"
        begun = [(share.encoding, share.place) for share in self._batch.shares] if self._batch is not None else []
        for job in jobs:
            open_ = {place for place, row in enumerate(job.rows) if row is None}
            assert open_ == set(job.waiting) | {place for owner, place in begun if owner is job}, "an input was lost"
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
        waiting.sort(key=lambda job: pooling_urgency(job, self._cost_ms(job.request.role, job.remaining), now))
        role = waiting[0].request.role
        urgent = [job for job in waiting if job.request.role == role]
        shares = pick_batch(urgent, self._budget(role, milliseconds))
        for share in shares:
            share.encoding.waiting.remove(share.place)
            share.encoding.began = share.encoding.began or now
        pieces = [share.encoding.request.inputs[share.place] for share in shares]
        self._used.add(role)
        work = self._encoders[role].model.run([p.tokens for p in pieces], [p.types for p in pieces])
        return PoolingBatch(role, shares, work)

    def _budget(self, role: PoolingTask, milliseconds: float) -> int:
        most = self._encoders[role].card.batch_tokens
        line = self._costs[role]
        if not line.known:
            return min(most, UNMEASURED_TOKENS)
        return max(1, int(min(most, max(line.size_for(milliseconds), 1.0))))

    def _cost_ms(self, role: PoolingTask, tokens: int) -> float:
        line = self._costs[role]
        return line.cost(tokens) if line.known else float(tokens)

    def _deliver(self, batch: PoolingBatch, rows: list[PooledRow]) -> None:
        self._costs[batch.role].observe(batch.padded_tokens, 1000 * batch.spent)
        for share, row in zip(batch.shares, rows, strict=True):
            if not math.isfinite(sum(row)):
                self._end(share.encoding.request.id, IngotError("The model answers with what is not a number"))
            share.encoding.rows[share.place] = row
        for encoding in dict.fromkeys(share.encoding for share in batch.shares):
            if not encoding.ended and None not in encoding.rows:
                self._close(encoding)

    def _close(self, encoding: RunningPooling) -> None:
        now = self._clock()
        began = encoding.began if encoding.began is not None else now
        rows = tuple(row for row in encoding.rows if row is not None)
        queued = began - encoding.request.arrived
        encoded = PoolingOutput(rows, encoding.request.tokens, queue_s=max(0.0, queued), compute_s=now - began)
        self._end(encoding.request.id, encoded)

    def _end(self, request_id: str, result: PoolingOutput | IngotError) -> None:
        with self._lock:
            encoding = self._jobs.pop(request_id, None)
            if encoding is not None:
                self._queued.add(encoding.request.tenant, -1)
        if encoding is None:
            return
        encoding.ended = True
        encoding.waiting = []
        try:
            encoding.reply(result)
        except Exception:  # whoever waited for it is at fault, and nobody else ends for that
            log.exception("nobody takes what request %s was answered", request_id)
        if self._batch is not None and all(share.encoding.ended for share in self._batch.shares):
            self._batch.work.close()
            self._batch = None
