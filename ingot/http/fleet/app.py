"""The application of a server with several models. Light to import and to make: what takes long comes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette

from ingot.config import Settings
from ingot.http.app import opened, own_endpoints
from ingot.http.body import FORM, JSON
from ingot.http.dispatch import ByBody, ByQuery
from ingot.http.endpoints.health import health_endpoints
from ingot.http.model_registry import Models
from ingot.http.routing import app_of
from ingot.protocol.model_names import DEFAULT_NAME
from ingot.protocol.operations import OPERATIONS
from ingot.protocol.terms import Terms

if TYPE_CHECKING:
    from ingot.engine.fleet import Fleet
    from ingot.engine.loop import Pulse

ANY_VOCAB: Final = 1 << 24
"""What the document says of token ids: which there are depends on the model."""


def build_fleet_app(fleet: Fleet, pulse: Callable[[], Pulse], settings: Settings) -> Starlette:
    """The whole HTTP side of a fleet. Nothing is started; `app.state.service` is what the endpoints share."""
    models = Models(fleet, pulse, settings, opened)
    own = health_endpoints(lambda: models.hall.health(models.health())) | own_endpoints(models)
    dispatched = {
        operation.name: ByBody(models, operation.name, FORM if operation.takes == "form" else JSON)
        if operation.takes in ("json", "form")
        else ByQuery(models, operation.name, works=operation.runs)
        for operation in OPERATIONS
        if operation.name not in own
    }
    names = tuple(name for entry in fleet.entries for name in entry.names)
    terms = Terms((*names, DEFAULT_NAME), ANY_VOCAB, settings.request_timeout_s, settings.strict)
    return app_of(models, own | dispatched, terms)
