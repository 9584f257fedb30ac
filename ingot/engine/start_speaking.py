"""From a model folder to speech that the engine offers, within the memory that other weights leave."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ingot.engine.speaking.request import SpeakingCard
from ingot.engine.text_to_speech import OfferedSpeech
from ingot.errors import ModelError
from ingot.extras import install_command, missing
from ingot.models.files.locate import ModelFolder
from ingot.models.kokoro_kokoro import load_kokoro
from ingot.text.speech.dictionary import read_ahead
from ingot.text.speech.phonemizer import ACCENTS, Pronouncer, accent_of


@dataclass(frozen=True, slots=True)
class Speaking:
    """What is offered, and what it takes of the memory budget."""

    offered: OfferedSpeech | None = None
    taken: int = 0

    @property
    def notes(self) -> list[str]:
        card = None if self.offered is None else self.offered.card
        return [] if card is None else [f"{card.name}: {note}" for note in card.notes]


NO_SPEECH = Speaking()


def offer_speech(folder: ModelFolder, free: int) -> Speaking:
    """Load it. Runs on the engine thread; `free` are the bytes that other models leave. Raises ModelError."""
    model = load_kokoro(folder.path)
    taken = model.weight_bytes + model.config.piece_bytes
    if taken > free:
        raise ModelError(
            f"{folder.name} takes {taken / 1e9:.1f} GB with a piece of speech, and {max(0, free) / 1e9:.1f} GB of the "
            "memory budget are left for it. Raise --memory or choose a smaller model."
        )
    voices = tuple(voice for voice in model.voices if voice[:1] in ACCENTS)
    if not voices:
        raise ModelError(f"{folder.name} has no voice that speaks English, which is what is pronounced here")
    read_ahead({accent_of(voice) for voice in voices})
    notes = []
    if foreign := len(model.voices) - len(voices):
        notes.append(f"{foreign} voices of other languages are left out: English is what is pronounced here")
    if wanted := missing("audio"):
        notes.append(f"speaks in wav and pcm alone; for mp3, the default, and others run {install_command(wanted)}")
    card = SpeakingCard(
        name=folder.name,
        source=folder.source,
        voices=voices,
        rate=model.rate,
        context=model.context,
        dtype=model.dtype,
        weight_bytes=model.weight_bytes,
        created=int(time.time()),
        notes=tuple(notes),
    )
    return Speaking(OfferedSpeech(card, Pronouncer(model.phonemes, model.context), model), taken)
