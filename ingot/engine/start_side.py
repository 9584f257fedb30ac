"""From a model folder to the engine of a model that does not generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ingot.config import Settings
from ingot.engine.admission import Limits
from ingot.engine.encoder_request import Role
from ingot.engine.loading.pooling_and_speech import offer
from ingot.engine.loop import Loop
from ingot.engine.side_engine import SideEngine, SideModel
from ingot.engine.start_hearing import offer_hearing
from ingot.engine.start_speaking import offer_speech
from ingot.kernels import device
from ingot.models.files.locate import ModelFolder
from ingot.models.pace import paced


def start_side_engine(
    settings: Settings, kind: str, folder: ModelFolder, *, memory: int, loop: Loop, between: Callable[[], None]
) -> SideEngine:
    """Load a model of this kind under the folder's name. `memory` are the bytes that it has, `loop` is the thread of
    all models, and `between` is called there after each piece of the load. Raises ModelError."""

    def load() -> SideModel:
        with paced(between):
            return LOADERS[kind](folder, settings, device.current(), memory)

    return SideEngine(load, Limits(settings.max_sequences, settings.max_queue, settings.target_itl_ms), loop)


def _encoder(role: Role) -> Load:
    def load(folder: ModelFolder, settings: Settings, here: device.Device, free: int) -> SideModel:
        encoders = offer({role: folder}, settings, here, free, batch_share=1.0).encoders
        return SideModel(encoders[role].card, encoders=encoders)

    return load


def _hearing(folder: ModelFolder, settings: Settings, here: device.Device, free: int) -> SideModel:
    offered = offer_hearing(folder, settings, here, free).offered
    assert offered is not None, "it was loaded"
    return SideModel(offered.card, hearing=offered)


def _speaking(folder: ModelFolder, settings: Settings, here: device.Device, free: int) -> SideModel:
    offered = offer_speech(folder, free).offered
    assert offered is not None, "it was loaded"
    return SideModel(offered.card, speaking=offered)


Load = Callable[[ModelFolder, Settings, device.Device, int], SideModel]
LOADERS: Final[dict[str, Load]] = {
    "embedding": _encoder("embedding"),
    "rerank": _encoder("rerank"),
    "audio": _hearing,
    "speech": _speaking,
}
"""By the kinds of models."""
