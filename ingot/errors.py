"""All errors: each has its HTTP status, its code, and a message that says what the user can do.

Every package raises these; the HTTP edge alone turns them into bodies. A message may be shown to a client, so it never
holds a secret, a path of the host or another tenant's text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ingot.quantities import counted


class IngotError(Exception):
    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class BadRequest(IngotError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnknownField(BadRequest):
    code = "unknown_parameter"


class Unsupported(BadRequest):
    """A parameter that is known and cannot be honoured here."""

    code = "unsupported_parameter"


class BadMedia(BadRequest):
    """An image, video or audio file that cannot be read, or is too large."""

    code = "invalid_media"


class AdapterError(BadRequest):
    """A LoRA adapter that cannot be read, or does not fit the model."""

    code = "invalid_adapter"


class ContextOverflow(BadRequest):
    code = "context_length_exceeded"

    def __init__(self, *, needed: int, limit: int, exactly: bool = True) -> None:
        """`exactly`: exactly so many are needed; else at least so many."""
        tokens = ("" if exactly else "at least ") + counted(needed, "token")
        super().__init__(
            f"This request needs {tokens} of context (prompt and at least one new token), but the model's "
            f"context is {counted(limit, 'token')}. Shorten the prompt, or serve with a longer context if the "
            "model has one.",
            param="messages",
        )
        self.needed, self.limit = needed, limit


class InputTooLong(BadRequest):
    """A text that is too long for an encoder, where the request did not ask to truncate it."""

    code = "context_length_exceeded"

    def __init__(self, *, needed: int, limit: int, remedy: str, param: str | None = None, exactly: bool = True) -> None:
        tokens = ("" if exactly else "at least ") + counted(needed, "token")
        super().__init__(f"This input has {tokens}, and the model reads {limit} at most. {remedy}", param=param)
        self.needed, self.limit = needed, limit


class Unauthorized(IngotError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(IngotError):
    status, type, code = 403, "permission_error", "forbidden"


class NotFound(IngotError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(IngotError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class RequestTooSlow(IngotError):
    """The client did not send its request in time."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class RequestTooLarge(IngotError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMedia(IngotError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class HeadersTooLarge(IngotError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"


class Overloaded(IngotError):
    """The queue is full; the same request may succeed after `retry_after` seconds."""

    status, type, code = 429, "rate_limit_error", "overloaded"


class RateLimited(IngotError):
    """The key has reached its limit for a minute."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class Cancelled(IngotError):
    status, type, code = 499, "request_cancelled", "cancelled"


class ClientLeft(Cancelled):
    """The client has disconnected."""


class Unavailable(IngotError):
    status, type, code = 503, "service_unavailable", "unavailable"


class DeviceLost(Unavailable):
    """The device is unusable for this process, which has to end."""

    code = "device_lost"
    exit_code = 75  # EX_TEMPFAIL: the same command may succeed when it is run again

    def __init__(self) -> None:
        super().__init__("The device was lost. The server is being started again.", retry_after=5)


class Stopping(Unavailable):
    """The server is stopping: it accepts no requests, or ends those that have not finished in time."""


class DeadlineExceeded(IngotError):
    status, type, code = 504, "timeout_error", "deadline_exceeded"


class ModelError(IngotError):
    """A model that cannot be found, read or run as asked."""

    code = "model_error"


class ConfigError(IngotError):
    code = "config_error"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is most likely a typo of, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return found[0] if found else None
