"""The endpoints behind the page about the engine. Figures are read as they stand: nobody waits for the engine, and a
model that nobody asks for may go while it is looked at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ingot.engine.cache_branch import CacheBranch
from ingot.engine.health import Health
from ingot.errors import Unavailable
from ingot.http.edge import Json, answer_of
from ingot.http.shared_state import Hall
from ingot.protocol.ingot_api.requests import PAST_S, live, live_engine
from ingot.protocol.ours.cache_tree import CacheTreeBody

if TYPE_CHECKING:
    from ingot.engine.engine import Engine


def live_endpoints(hall: Hall, engines: Callable[[], Sequence[Engine]], health: Callable[[], Health]) -> dict[str, Any]:
    """`engines` gives those of the models that are loaded."""

    async def now(request: Request) -> Response:
        answer, at = answer_of(request.scope), time.monotonic()
        everyone = (status for engine in engines() for status in engine.status())
        statuses = [one for one in everyone if answer.admin or one.tenant == answer.tenant]
        past = (span for span in hall.past.since(at - PAST_S) if answer.admin or span.tenant == answer.tenant)
        whole = [live_engine(one.card, one.health(), one.figures, one.speculation) for one in engines()]
        return Json(live(health(), statuses, past, at, whole if answer.admin else UNSET))

    async def tree(request: Request) -> Response:
        # Engines are asked between two steps, which must not hold up the streams.
        return Json(CacheTreeBody.of(await asyncio.to_thread(trees, engines(), answer_of(request.scope).tenant)))

    return {"showLive": now, "showCacheTree": tree}


def trees(engines: Sequence[Engine], tenant: str) -> list[Sequence[CacheBranch]]:
    """Of each model that is still there."""
    found: list[Sequence[CacheBranch]] = []
    for engine in engines:
        with suppress(Unavailable):
            found.append(engine.kept.tree(tenant))
    return found
