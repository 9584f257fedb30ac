"""Models that serve beside one that generates: vectors and scores, speech in, speech out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.config import Settings
from ingot.engine.encoder_request import Role
from ingot.engine.loading.pooling_and_speech import Offered, offer
from ingot.engine.start_hearing import NO_HEARING, Hearing, offer_hearing
from ingot.engine.start_speaking import NO_SPEECH, Speaking, offer_speech
from ingot.kernels.device import Device
from ingot.models.files.locate import ModelFolder


@dataclass(frozen=True, slots=True)
class Beside:
    encoders: Offered
    hearing: Hearing
    speaking: Speaking

    @property
    def taken(self) -> int:
        """Of the memory budget."""
        return self.encoders.weights + self.encoders.batch + self.hearing.taken + self.speaking.taken

    @property
    def notes(self) -> list[str]:
        return [*self.encoders.notes, *self.hearing.notes, *self.speaking.notes]


def offer_beside(
    encoders: Mapping[Role, ModelFolder],
    hearing: ModelFolder | None,
    speaking: ModelFolder | None,
    settings: Settings,
    here: Device,
    free: int,
) -> Beside:
    """Load them. Runs on the engine thread; `free` are the bytes that the generating model's weights leave. Raises
    ModelError."""
    offered, ears, mouth = offer(encoders, settings, here, free), NO_HEARING, NO_SPEECH
    free -= offered.weights + offered.batch
    if hearing is not None:
        ears = offer_hearing(hearing, settings, here, free)
    if speaking is not None:
        mouth = offer_speech(speaking, free - ears.taken)
    return Beside(offered, ears, mouth)
