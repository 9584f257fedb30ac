"""From a model folder to hearing that the engine offers, within the memory that other weights leave."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ingot.config import Settings
from ingot.engine.hearing.jobs import OfferedHearing
from ingot.engine.speech_request import HearingCard
from ingot.errors import ModelError
from ingot.extras import require
from ingot.kernels.device import Device
from ingot.media import worker
from ingot.models.files.locate import ModelFolder
from ingot.models.whisper_whisper import load_whisper
from ingot.text.tokenizer.whisper import WhisperVocabulary


@dataclass(frozen=True, slots=True)
class Hearing:
    """What is offered, and what it takes of the memory budget."""

    offered: OfferedHearing | None = None
    taken: int = 0

    @property
    def notes(self) -> list[str]:
        card = None if self.offered is None else self.offered.card
        return [] if card is None else [f"{card.name}: {note}" for note in card.notes]


NO_HEARING = Hearing()


def offer_hearing(folder: ModelFolder, settings: Settings, device: Device, free: int) -> Hearing:
    """Load it. Runs on the engine thread; `free` are the bytes that other models leave. Raises ModelError, and
    ConfigError where sounds cannot be unpacked."""
    require("audio", f"{folder.name}, which hears,")
    model = load_whisper(folder.path, device, dtype=settings.dtype)
    taken = model.weight_bytes + model.window_bytes + worker.headers.memory + worker.samples.memory
    if taken > free:
        raise ModelError(
            f"{folder.name} takes {taken / 1e9:.1f} GB with a window of sound, and {max(0, free) / 1e9:.1f} GB of the "
            "memory budget are left for it. Raise --memory or choose a smaller model."
        )
    vocabulary = WhisperVocabulary.load(folder.path, model.config.vocab)
    card = HearingCard(
        name=folder.name,
        source=folder.source,
        languages=tuple(vocabulary.languages) or ("en",),
        translates=vocabulary.multilingual,
        context=model.context,
        dtype=model.dtype,
        weight_bytes=model.weight_bytes,
        created=int(time.time()),
        notes=model.notes,
    )
    return Hearing(OfferedHearing(card, model.config.mels, vocabulary, model), taken)
