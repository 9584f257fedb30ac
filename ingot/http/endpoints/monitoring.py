"""The endpoints for whoever watches the server. What they tell is of all tenants, and so is told to the administrator.

Figures are read as they stand: nobody waits for the engine, and the engine for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import Forbidden
from ingot.http.edge import Json, answer_of
from ingot.http.shared_state import Hall
from ingot.http.side_service import SideService
from ingot.observe.prometheus import CONTENT_TYPE
from ingot.protocol.ingot_api.metrics import Measured, SideMeasured, metrics
from ingot.protocol.lora_adapters import lora_info
from ingot.protocol.ours.loads import loads
from ingot.protocol.ours.ranks import rank_metrics

if TYPE_CHECKING:
    from ingot.engine.engine import Engine


def metrics_endpoints(
    engines: Callable[[], Sequence[Engine]], services: Callable[[], Iterable[SideService]], hall: Hall
) -> dict[str, Any]:
    """`engines` gives those of the loaded models that generate, `services` those of all."""

    async def scraped(request: Request) -> Response:
        _refuse_others(request, "the metrics")
        measured = [measure(one, hall) for one in engines()]
        sides = [side for service in services() for side in measure_sides(service)]
        return Response(metrics(measured, hall.statuses, sides), headers={"content-type": CONTENT_TYPE})

    async def asked(request: Request) -> Response:
        _refuse_others(request, "how busy the server is")
        return Json(loads([(one.card, one.status(), one.figures) for one in engines()]))

    return {"metrics": scraped, "loads": asked}


def measure(engine: Engine, hall: Hall) -> Measured:
    name = engine.card.name
    loras = (lora_info(name, engine.status(), hall.settings.max_loras),) if engine.loras else ()
    further = (*loras, *rank_metrics(name, hall.standings()))
    beside, health = engine.side_loads().values(), engine.health()
    # Each is read at its own moment.
    running = max(0, health.running - sum(running for running, _ in beside))
    queued = max(0, health.queued - sum(waiting for _, waiting in beside))
    own = replace(health, running=running, queued=queued)
    return Measured(engine.card, own, engine.figures, engine.speculation, further)


def measure_sides(service: SideService) -> Iterator[SideMeasured]:
    """The models that do not generate, alone or beside one that does."""
    for name, (running, waiting) in service.engine.side_loads().items():
        yield SideMeasured(name, running, waiting, service.side_figures(name))


def _refuse_others(request: Request, what: str) -> None:
    if not answer_of(request.scope).admin:
        raise Forbidden(
            f"Only the administrator may see {what}: send the key that the server was started with as --admin-api-key."
        )
