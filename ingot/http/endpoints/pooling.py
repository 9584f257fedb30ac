"""The endpoints of pooling models: read a body, wait for its vectors or scores, send them. Leaving ends the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import anyio.to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.http.accounting import TaskAccount
from ingot.http.body import RequestBody
from ingot.http.capture import wants_capture
from ingot.http.edge import reply_of
from ingot.http.endpoints.generation import BodyEndpoint
from ingot.http.request_lifetime import RequestLifetime
from ingot.http.service import ModelService
from ingot.http.streaming import WholeResponse, reporting_errors
from ingot.http.tenants import check_model_allowed
from ingot.protocol.pooling import EncodingTask
from ingot.protocol.served import ServedTaskModel

if TYPE_CHECKING:
    from ingot.engine.engine import PoolingEngine

ReadEncodingBody = Callable[[Any, ServedTaskModel, str], EncodingTask]


class EncodingEndpoint(BodyEndpoint[ModelService, ReadEncodingBody]):
    async def answer(self, body: RequestBody, scope: Scope, receive: Receive, send: Send) -> None:
        answer = reply_of(scope)
        served = self.service.served_for(answer.tenant)
        whole = WholeResponse(answer, send, self.service.shared_state.settings)
        captured = body.raw if wants_capture(self.service.captures, scope) else b""

        async def work() -> None:
            task = await self.service.read(body.raw, lambda value: self.read(value, served, answer.id), answer.tenant)
            body.release()
            key, tokens = self.service.shared_state.tenants.key_of(answer.tenant), task.request.tokens
            card = served.card
            check_model_allowed(card.name, key, answer)
            with TaskAccount(self.service, answer, self.operation.span) as request:
                async with whole.waiting():
                    encoded = await cast("PoolingEngine", self.service.engine).encode(task.request)
                request.computed(encoded)
            if self.service.captures is not None and captured:
                self.service.captures.encoded(captured, scope["path"], task.request, card, encoded)
            self.service.shared_state.rates.charge(answer.tenant, key, tokens)
            # A thousand vectors are megabytes of JSON, which would hold up every stream.
            content = await anyio.to_thread.run_sync(task.make_body, encoded)
            await Response(content, media_type="application/json")(scope, receive, whole.send)

        async with reporting_errors(answer, whole):
            await self.service.shared_state.live.run(
                RequestLifetime(receive, self.service.shared_state.settings.request_timeout_s), work
            )
