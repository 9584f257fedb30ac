"""The endpoints of pooling models: read a body, wait for its numbers, tell them. Leaving ends the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import anyio.to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.engine.request import PoolingTask
from ingot.http.accounting import SideRequestAccount
from ingot.http.body import HeldBody
from ingot.http.capture import wants_capture
from ingot.http.edge import ClientGone, as_ingot_error, reply_of
from ingot.http.request_lifetime import RequestLifetime
from ingot.http.service import SideService
from ingot.http.streaming import WholeResponse
from ingot.http.tenants import check_model_allowed
from ingot.protocol.pooling import EncodingTask
from ingot.protocol.served import ServedSideModel

ReadEncodingBody = Callable[[Any, ServedSideModel, str], EncodingTask]
ENCODING_OPERATIONS: Final[dict[PoolingTask, str]] = {"embedding": "embeddings", "rerank": "rerank"}
"""What OpenTelemetry's conventions call them, as far as they do."""


class EncodingEndpoint:
    """One ASGI endpoint. `read` is the protocol's half: it makes a decoded body into a job."""

    def __init__(self, service: SideService, read: ReadEncodingBody) -> None:
        self.service, self.read = service, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.service.bodies.reading(scope, receive) as body:
            await self._answer(body, scope, receive, send)

    async def _answer(self, body: HeldBody, scope: Scope, receive: Receive, send: Send) -> None:
        answer = reply_of(scope)
        served = self.service.served_for(answer.tenant)
        held = WholeResponse(answer, send, self.service.settings)
        captured = body.raw if wants_capture(self.service.captures, scope) else b""

        async def work() -> None:
            job = await self.service.read(body.raw, lambda value: self.read(value, served, answer.id), answer.tenant)
            body.let_go()
            key, tokens = self.service.tenants.key_of(answer.tenant), job.request.tokens
            card = self.service.engine.encoders[job.request.role].card
            check_model_allowed(card.name, key, answer)
            with SideRequestAccount(self.service, answer, card.name, ENCODING_OPERATIONS[job.request.role]) as request:
                async with held.waiting():
                    encoded = await self.service.engine.encode(job.request)
                request.computed(encoded)
            if self.service.captures is not None and captured:
                self.service.captures.encoded(captured, scope["path"], job.request, card, encoded)
            self.service.rates.charge(answer.tenant, key, tokens)
            # A thousand vectors are megabytes of JSON, which would hold up every stream.
            told = await anyio.to_thread.run_sync(job.told, encoded)
            await Response(told, media_type="application/json")(scope, receive, held.send)

        try:
            await self.service.live.run(RequestLifetime(receive, self.service.settings.request_timeout_s), work)
        except ClientGone:
            raise
        except Exception as error:  # an answer that has begun ends in words, whatever broke it
            if not held.begun:
                raise
            await held.fail(as_ingot_error(error, answer.id))
