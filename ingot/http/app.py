"""What a server imports once it is ready: all that knows what bodies and answers look like.

That takes a second or more, and a lazy server is there before. So it is imported in the background, or by whoever needs
it first, in a thread: streams go on meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from ingot.config import ModelEntry
from ingot.http.model_registry import Endpoints, Extend, Models, Opening
from ingot.http.shared_state import Hall

if TYPE_CHECKING:
    from ingot.engine.side_engine import SideEngine
    from ingot.http.side_service import SideService

OWN: Final = frozenset(
    {
        *("listModels", "retrieveModel", "loadModel", "unloadModel", "swapModel"),
        *("ollamaTags", "ollamaRunning", "ollamaVersion"),
        *("listRequests", "retrieveRequest", "cancelRequest"),
        *("retrieveResponse", "deleteResponse", "cancelResponse", "listInputItems"),
        *("showLive", "showCacheTree", "metrics", "loads"),
    }
)
"""Operations that tell of all models, or change which are loaded."""


def import_soon(then: Callable[[], None]) -> None:
    """In the background, before `then`, which imports what takes longer and is needed later."""

    def run() -> None:
        _imported()
        then()

    threading.Thread(target=run, name="ingot-imports", daemon=True).start()


def opened(engine: SideEngine, entry: ModelEntry, hall: Hall, extend: Extend) -> tuple[SideService, Endpoints]:
    """The service of a loaded model and its endpoints. Takes long at first: not for an event loop."""
    open_model, _ = _imported()
    return open_model(engine, entry, hall, extend)


def own_endpoints(models: Models) -> Endpoints:
    """By the names of their operations."""
    made: Endpoints = {}

    def later(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if not made:
                _, make = await anyio.to_thread.run_sync(_imported)
                made.update(make(models))
            answer: Response = await made[name](request)
            return answer

        return endpoint

    return {name: later(name) for name in OWN}


def _imported() -> tuple[Opening, Callable[[Models], Endpoints]]:
    from ingot.http.fleet.endpoints import fleet_endpoints
    from ingot.http.fleet.opening import opened

    return opened, fleet_endpoints
