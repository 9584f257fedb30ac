"""What a loaded model's requests go to, as its kind has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ingot.config import ModelEntry
from ingot.http.endpoints.table import endpoints_of, side_endpoints
from ingot.http.model_registry import CHAT, Endpoints, Extend
from ingot.http.service import Service
from ingot.http.shared_state import Hall
from ingot.http.side_service import SideService
from ingot.protocol.side_served import SideServed

if TYPE_CHECKING:
    from ingot.engine.encoder_request import EncoderCard
    from ingot.engine.engine import Engine
    from ingot.engine.side_engine import SideEngine
    from ingot.engine.speaking.request import SpeakingCard
    from ingot.engine.speech_request import HearingCard


def opened(engine: SideEngine, entry: ModelEntry, hall: Hall, extend: Extend) -> tuple[SideService, Endpoints]:
    """Its service and its endpoints."""
    if entry.kind == CHAT:
        service = Service(cast("Engine", engine), entry.settings, hall, extend)
        return service, endpoints_of(service)
    hearing = None if engine.hearing is None else engine.hearing.card
    card = cast("EncoderCard | HearingCard | SpeakingCard", engine.card)
    served = SideServed.alone(card, entry.settings, engine.encoders, hearing, engine.speaking)
    side = SideService(engine, served, entry.settings, hall)
    return side, side_endpoints(side)
