"""The outermost layer: each request gets its id, its log line, and an answer even where something broke.

The audit log has a line for each request that was refused for its key, origin or rate. No line contains a key: an
unknown one is logged as its digest, so that a withdrawn one can be recognised.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.errors import ClientLeft, Forbidden, IngotError, RateLimited, Stopping
from ingot.observe.logs import current_request_id, log_facts
from ingot.protocol.errors import error_body, retry_after
from ingot.protocol.operations import PLAIN_ID, operation_at, wire_at

log = logging.getLogger("ingot.http")

MONITORING_PATHS: Final = frozenset({"/metrics", "/v1/loads", "/v1/live"})
# Statuses after which the connection cannot be reused: the rest of a body may still be sent.
CLOSING_STATUSES: Final = frozenset({401, 403, 408, 413, 415})


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class EdgeMiddleware:
    """`statuses` counts the answers."""

    def __init__(self, app: ASGIApp, statuses: Counter[int]) -> None:
        self.app, self.statuses = app, statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = Reply(scope, send)
        current_request_id.set(answer.id)
        try:
            await self.app(scope, receive, answer.send)
        except ClientGone:
            # Whatever was sent: nobody read it to its end, unless the connection was closed with an error.
            answer.status = ClientLeft.status if answer.closed_with is None else answer.closed_with.status
        except asyncio.CancelledError:  # by a server that has stopped
            await answer.fail(Stopping("The server is shutting down."))
        except Exception as error:  # whatever it was, the client gets an answer and the log gets the reason
            await answer.fail(as_ingot_error(error, answer.id))
        finally:
            self.statuses[answer.status] += bool(answer.status)
            answer.write_log()


class Reply:
    """The answer to one request while it is sent. `headers` are added to any answer, also to an error."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope, self._send = scope, send
        self.began = time.perf_counter()
        self.status = 0
        self.tenant = ""  # set by the guard, from the key
        self.admin = False  # has the administrator's rights, as everyone has where there are no keys
        self.known = True  # has a valid key, or the server needs none
        self.body = b""  # the raw body, where it is to be captured
        self.ended_by: Callable[[], IngotError | None] = lambda: None  # why the server ended it before its answer did
        operation, wire = operation_at(scope["path"]), wire_at(scope["path"])
        self.id = (PLAIN_ID if operation is None else operation.id_prefix) + secrets.token_hex(12)
        self.headers: list[tuple[str, str]] = [("x-request-id", self.id), ("x-content-type-options", "nosniff")]
        if wire.id_header:
            self.headers.append((wire.id_header, self.id))
        scope.setdefault("state", {})["answer"] = self

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in self.headers:
                headers.setdefault(name, value)
        await self._send(message)

    async def fail(self, error: IngotError) -> None:
        if self.status:
            return  # half an answer is sent: the server closes the connection, so that the client knows
        if error.status in CLOSING_STATUSES:
            self.headers.append(("connection", "close"))
        if (seconds := retry_after(error)) is not None:
            self.headers.append(("retry-after", seconds))
        body = error_body(error, self.scope["path"], self.id)
        await JsonResponse(body, error.status)(self.scope, receive_nothing, self.send)

    def require_admin(self, deed: str) -> None:
        """Raises Forbidden unless the request has the administrator's rights."""
        if not self.admin:
            raise Forbidden(
                f"Only the administrator may {deed}: send the key that the server was started with as --admin-api-key."
            )

    @property
    def closed_with(self) -> IngotError | None:
        """The error that its connection was closed with, to make room for others or as the server stops."""
        error: IngotError | None = self.scope["state"].get("closed_with")
        return error

    def write_log(self) -> None:
        took = (time.perf_counter() - self.began) * 1000
        method, path = self.scope["method"], self.scope["path"]
        # Probes come every few seconds; files of the page, floods without a key, and requests that a stopping server
        # cuts off, by the hundred.
        is_frequent = (
            path.startswith("/health")
            or (path.startswith("/static/") and self.status < 400)
            or path in MONITORING_PATHS
            or (self.status == RateLimited.status and not self.known)
            or isinstance(self.closed_with, Stopping)
        )
        level = logging.DEBUG if is_frequent else logging.INFO
        facts = log_facts(
            self.id, event="answered", status=self.status, took_s=round(took / 1000, 4), tenant=self.tenant
        )
        log.log(level, "%s %.200r %d %.1f ms %s", method, path, self.status, took, self.id, extra=facts)


def reply_of(scope: Scope) -> Reply:
    answer: Reply = scope["state"]["answer"]
    return answer


def as_ingot_error(error: Exception, id: str) -> IngotError:
    """`error` as a client may see it. An unexpected one is logged, and the client gets only its id."""
    if isinstance(error, IngotError):
        return error
    log.error("request %s failed", id, exc_info=error, extra=log_facts(id, event="failed"))
    return IngotError(f"The server failed on this request. Its log has the reason under {id}.")


async def receive_nothing() -> Message:
    """For responses that do not need the rest of the request."""
    return {"type": "http.disconnect"}


class JsonResponse(Response):
    """A response whose content is any value that can be encoded as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


audit_log = logging.getLogger("ingot.audit")


def audit_refusal(answer: Reply, error: IngotError, key: str) -> None:
    """`key` is the name of the key, or a description of an unknown one."""
    scope = answer.scope
    address = (scope.get("client") or ("an unknown address",))[0]
    audit_log.warning(
        "%s refused, %d %s: %s %.200r from %s, key %s",
        *(answer.id, error.status, error.code, scope["method"], scope["path"], address, key),
        extra=log_facts(answer.id, event="refused", status=error.status, code=error.code, address=address, key=key),
    )
