"""The audit log: a line for each request that was refused for who sent it, whence, or how many it sent. No line holds a
key: one that nobody knows is told by its digest, so that a withdrawn one can be recognised."""

from __future__ import annotations

import logging

from ingot.errors import IngotError
from ingot.http.edge import Reply
from ingot.observe.logs import about

log = logging.getLogger("ingot.audit")


def refused(answer: Reply, error: IngotError, key: str) -> None:
    """`key` is whose it was, or what can be told of it."""
    scope = answer.scope
    address = (scope.get("client") or ("an unknown address",))[0]
    log.warning(
        "%s refused, %d %s: %s %.200r from %s, key %s",
        *(answer.id, error.status, error.code, scope["method"], scope["path"], address, key),
        extra=about(answer.id, event="refused", status=error.status, code=error.code, address=address, key=key),
    )
