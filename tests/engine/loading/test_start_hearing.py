"""From a folder to ears that the engine offers: what they are, what they take, and that they hear."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest

from ingot.config import Settings
from ingot.engine.hearing.jobs import TranscriptJobs
from ingot.engine.speech_request import Transcribed, TranscriptEvent, TranscriptionRequest
from ingot.engine.start_hearing import Hearing, offer_hearing
from ingot.errors import ModelError
from ingot.kernels.device import current
from ingot.media.audio import Sound
from ingot.models.files.locate import ModelFolder
from tests.hearing import save_ears, tone, wav


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = save_ears(tmp_path_factory.mktemp("random-ears"))
    return ModelFolder(path, "random-ears", "a test")


def offered(folder: ModelFolder, free: int = 1 << 30) -> Hearing:
    return offer_hearing(folder, Settings(), current(), free)


def test_the_card_tells_what_the_model_hears(folder: ModelFolder) -> None:
    hearing = offered(folder)
    assert hearing.offered is not None
    card = hearing.offered.card
    assert (card.name, card.translates, card.context) == ("random-ears", True, 24) and "de" in card.languages
    assert hearing.taken > card.weight_bytes > 0


def test_a_model_that_does_not_fit_the_budget_is_refused(folder: ModelFolder) -> None:
    with pytest.raises(ModelError, match="memory budget are left"):
        offered(folder, free=1000)


def test_random_ears_come_to_an_end_too(folder: ModelFolder) -> None:
    hearing, mail = offered(folder), queue.SimpleQueue[Callable[[], None]]()
    desk = TranscriptJobs(hearing.offered, mail.put, max_queue=1, target_ms=100.0)
    events: list[TranscriptEvent] = []
    desk.accept(TranscriptionRequest("a", Sound(wav(tone(2))), words=True), events.extend)
    while desk.status(0.0):
        desk.advance(0.0, lambda: False)
        while not (mail.empty() and (desk.busy or not desk.status(0.0))):
            mail.get(timeout=60)()
    desk.close()
    last = events[-1]
    assert isinstance(last, Transcribed) and last.seconds == 2.0
    assert hearing.offered is not None and last.language in hearing.offered.card.languages
