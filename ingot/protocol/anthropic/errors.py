"""An error as Anthropic's clients expect it."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, Struct, UnsetType

from ingot.errors import ContextOverflow, IngotError, Unsupported

TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(Struct):
    """What clients go by rather than by words."""

    error_code: str


class AnthropicErrorDetail(Struct):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class AnthropicError(Struct, tag_field="type", tag="error", kw_only=True):
    """A body, and the last event of a stream that broke."""

    error: AnthropicErrorDetail
    request_id: str

    @classmethod
    def of(cls, error: IngotError, request_id: str) -> AnthropicError:
        kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return cls(error=AnthropicErrorDetail(kind, error_message(error), details(error)), request_id=request_id)


def details(error: IngotError) -> ErrorDetails | UnsetType:
    """Who asks for a thread is told so by a code, and then sends the whole conversation without one."""
    unthreaded = isinstance(error, Unsupported) and error.param == "thread"
    return ErrorDetails("thread_unsupported_request") if unthreaded else UNSET


def error_message(error: IngotError) -> str:
    """Agents know by these words that it is time to shorten the conversation."""
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.needed} tokens > {error.limit} maximum. {error.message}"
    return error.message
