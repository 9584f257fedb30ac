"""Error bodies in each protocol's format. OpenAI's is also that of our own paths.

Light to import: a server answers with these before it has imported any protocol.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from ingot.errors import ContextOverflow, IngotError, Unsupported
from ingot.protocol.operations import load, wire_at
from ingot.quantities import counted


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    error: ErrorDetail

    @classmethod
    def of(cls, error: IngotError, request_id: str = "") -> ErrorBody:
        return cls(ErrorDetail(error.message, error.type, error.param, error.code))


class StreamFault(Struct, tag_field="type", tag="error", kw_only=True):
    """The error event of a stream of `/v1/responses` that failed before it began."""

    code: str
    message: str
    param: str | None
    sequence_number: int = 0

    @classmethod
    def of(cls, error: IngotError, request_id: str) -> StreamFault:
        return cls(code=error.code or "", message=error.message, param=error.param)


def error_body(error: IngotError, path: str, request_id: str) -> Struct:
    """The error body of the protocol that `path` belongs to."""
    body: Struct = load(wire_at(path).error).of(error, request_id)
    return body


def error_event(error: IngotError, path: str, request_id: str) -> Struct:
    """The same, as the last event of a stream that failed before it began."""
    wire = wire_at(path)
    body: Struct = load(wire.fault or wire.error).of(error, request_id)
    return body


def retry_after(error: IngotError) -> str | None:
    """The `Retry-After` header's value: whole seconds, at least one."""
    return None if error.retry_after is None else str(max(1, math.ceil(error.retry_after)))


ANTHROPIC_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorInfo(Struct):
    """For clients that check codes rather than messages."""

    error_code: str


class AnthropicErrorDetail(Struct):
    type: str
    message: str
    details: AnthropicErrorInfo | UnsetType = UNSET


class AnthropicError(Struct, tag_field="type", tag="error", kw_only=True):
    """A body, and the last event of a stream that broke."""

    error: AnthropicErrorDetail
    request_id: str

    @classmethod
    def of(cls, error: IngotError, request_id: str) -> AnthropicError:
        kind = ANTHROPIC_ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        message = error.message
        if isinstance(error, ContextOverflow):  # agents recognise this message, and shorten the conversation
            message = f"prompt is too long: {counted(error.needed, 'token')} > {error.limit} maximum. {message}"
        # By this code, a client that sent a thread knows that it has to send the whole conversation.
        is_thread = isinstance(error, Unsupported) and error.param == "thread"
        info = AnthropicErrorInfo("thread_unsupported_request") if is_thread else UNSET
        return cls(
            error=AnthropicErrorDetail(kind, message, info),
            request_id=request_id,
        )


class OllamaError(Struct):
    error: str

    @classmethod
    def of(cls, error: IngotError, request_id: str = "") -> OllamaError:
        return cls(error.message)
