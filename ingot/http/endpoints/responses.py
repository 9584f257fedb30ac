"""`POST /v1/responses`: answered whole, as a stream of events, or at once while the work goes on without a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing

from msgspec import Struct
from starlette.types import Message, Receive, Scope, Send

from ingot.errors import IngotError, Stopping
from ingot.http.body import Body
from ingot.http.capture import to_capture
from ingot.http.edge import ClientGone, Json, Reply, answer_of, as_ingot_error
from ingot.http.request_lifetime import Exchange
from ingot.http.response_runs import EVENTS, Run, tell
from ingot.http.responses.endpoints import Responses
from ingot.http.streaming import HeldResponse, StreamedResponse
from ingot.http.streaming_feed import Feed, FeedReader
from ingot.protocol.responses.request import read_response

Batches = AsyncGenerator[list[Struct], None]


class CreateResponse:
    """One ASGI endpoint."""

    def __init__(self, responses: Responses) -> None:
        self._responses, self._service = responses, responses.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._service.bodies.reading(scope, receive) as body:
            await self._answer(body, scope, receive, send)

    async def _answer(self, body: Body, scope: Scope, receive: Receive, send: Send) -> None:
        noted = answer_of(scope)
        out = StreamedResponse(send, EVENTS, self._service.settings)
        held = HeldResponse(noted, send, self._service.settings)
        run: Run | None = None

        async def answer() -> None:
            nonlocal run
            run = await self._begun(body, noted)
            alone = run.plan.body.background
            reader = await self._alone(run, noted) if alone else None
            async with aclosing(self._attended(run) if reader is None else reader.batches()) as batches:
                if run.plan.body.stream:
                    await tell(batches, lambda: run.silence(reader), out)
                    return
                if not alone:
                    async with held.waiting():
                        await consume(batches)
                if run.error is not None and not held.begun:  # else the body tells that it failed
                    raise run.error
                await Json(run.body())(scope, receive, held.send)

        exchange = Exchange(receive, self._service.settings.request_timeout_s, noted)
        try:
            await self._service.live.run(exchange, answer)
        except ClientGone:
            raise
        except Exception as error:  # an answer that has begun ends in words, whatever broke it
            if held.begun:
                await held.fail(as_ingot_error(error, noted.id))
                return
            if not out.started or run is None:
                raise
            await out.end(EVENTS.framed(run.plan.composer.failed(as_ingot_error(error, noted.id))))

    async def _begun(self, body: Body, noted: Reply) -> Run:
        responses, service = self._responses, self._service
        if to_capture(service.captures, noted.scope):
            noted.body = body.raw
        served = service.served_to(noted.tenant)
        plan = await service.read(
            body.raw,
            lambda value: read_response(value, served, noted.id, responses.around(noted.tenant)),
            noted.tenant,
        )
        body.let_go(kept=bool(plan.first.request.media))
        run = Run(service, plan, noted, responses.call, responses.keep)
        await run.start()
        return run

    async def _attended(self, run: Run) -> Batches:
        """The events of a response that ends with its client."""
        self._responses.runs.add(run)
        try:
            async with aclosing(run.batches()) as batches:
                async for told in batches:
                    yield told
        finally:
            run.close()
            run.ended.set()
            self._responses.runs.remove(run)

    async def _alone(self, run: Run, noted: Reply) -> FeedReader:
        """The events of a response that goes on whether or not anybody reads them."""
        run.feed = feed = Feed()
        self._responses.runs.add(run)
        await self._responses.keep(run)
        self._responses.go_alone(self._drained(run, feed, noted, self._service.extend()))
        return feed.reader()

    async def _drained(self, run: Run, feed: Feed, noted: Reply, let_go: Callable[[], None]) -> None:
        async def work() -> None:
            async with aclosing(run.batches()) as batches:
                async for told in batches:
                    feed.put(told)

        try:
            await self._service.live.run(Exchange(silence, self._service.settings.request_timeout_s, noted), work)
        except asyncio.CancelledError:
            self._broken(run, Stopping("The server is shutting down."))
            raise
        except Exception as error:  # nobody else would hear of it
            self._broken(run, as_ingot_error(error, run.id))
        finally:
            run.close()
            run.ended.set()
            self._responses.runs.end(run, feed)
            feed.end()
            let_go()

    def _broken(self, run: Run, error: IngotError) -> None:
        run.plan.composer.failed(error)
        self._responses.keep_now(run)


async def consume(batches: AsyncIterable[list[Struct]]) -> None:
    async for _ in batches:
        pass


async def silence() -> Message:
    """A client that neither sends anything nor leaves."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}
