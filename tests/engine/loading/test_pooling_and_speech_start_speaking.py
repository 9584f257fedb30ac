"""A text-to-speech model from its folder: what it is, what it takes, and that it speaks."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from ingot.cli.serve import require_extras
from ingot.config import Settings, single_model_entries
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import TextToSpeechEngine
from ingot.engine.loading.pooling_and_speech import load_text_to_speech
from ingot.engine.speech_request import SpeechAudio, SpeechEnded, SpeechRequest
from ingot.engine.text_to_speech import ServedTextToSpeech
from ingot.errors import ModelError, Unsupported
from ingot.kernels.device import current_device
from ingot.media.audio import audio_writer
from ingot.models.files.locate import ModelFolder, model_kind_in
from ingot.models.memory_needs import text_to_speech_needs
from ingot.text.speech import dictionary
from tests.speaking import VOICES, save_kokoro
from tests.waiting import WAIT_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder(save_kokoro(tmp_path_factory.mktemp("mouths") / "tiny"), "tiny-mouth", "a test")


def loaded(folder: ModelFolder, memory: int = 1 << 30) -> ServedTextToSpeech:
    return load_text_to_speech(folder, memory)


def test_the_card_has_the_voices_that_speak_english(folder: ModelFolder) -> None:
    card = loaded(folder).card
    assert (card.name, card.voices, card.rate, card.context) == ("tiny-mouth", VOICES, 24_000, 254)
    assert card.notes == ("1 voices of other languages are left out: only English is spoken here",)


def test_without_what_writes_mp3_it_speaks_in_wav_and_says_so(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert "writes only wav and pcm; for mp3, the default, and other formats run " in loaded(folder).card.notes[1]
    require_extras(single_model_entries(Settings(speech_model=str(folder.path))))
    assert audio_writer("wav", 24_000).write(b"\0\0").startswith(b"RIFF")
    with pytest.raises(Unsupported, match=r"mp3 is written by PyAV.*wav and pcm need none"):
        audio_writer("mp3", 24_000)


def test_its_dictionaries_are_read_when_it_is_loaded(folder: ModelFolder) -> None:
    dictionary._read_dictionary.cache_clear()
    loaded(folder)
    for thread in threading.enumerate():
        if thread.name == "ingot-dictionaries":
            thread.join(WAIT_S)
    assert dictionary._read_dictionary.cache_info().currsize == 2


def test_a_model_that_does_not_fit_the_budget_is_refused(folder: ModelFolder) -> None:
    with pytest.raises(ModelError, match="memory budget are left"):
        loaded(folder, 1000)


def test_its_files_tell_what_it_is_for_and_what_it_takes(folder: ModelFolder) -> None:
    assert model_kind_in(folder.path) == "speech"
    needs = text_to_speech_needs(folder.path, current_device())
    assert loaded(folder, needs).card.weight_bytes < needs
    with pytest.raises(ModelError, match="memory budget are left"):
        loaded(folder, int(needs / 1.01))


def test_an_engine_speaks_a_text_to_its_end(folder: ModelFolder) -> None:
    async def listen(engine: TextToSpeechEngine) -> list[object]:
        pieces = engine.model.pronouncer.pieces("Hello there, you two. This is a second sentence, too.", VOICES[0])
        stream = engine.speak(SpeechRequest("one", pieces, VOICES[0]))
        return [event async for event in stream]

    engine = TextToSpeechEngine(lambda: loaded(folder), EngineLimits(1, 1, 50.0))
    try:
        *sounds, ended = asyncio.run(listen(engine))
        engine.check()
    finally:
        engine.close()
    assert isinstance(ended, SpeechEnded) and len(sounds) == 2
    assert sum(len(sound.samples) for sound in sounds if isinstance(sound, SpeechAudio)) == 2 * ended.samples
    assert ended.samples % 600 == 0


def test_a_folder_without_an_english_voice_is_refused(tmp_path: Path) -> None:
    foreign = save_kokoro(tmp_path / "foreign")
    for voice in VOICES:
        (foreign / "voices" / f"{voice}.safetensors").unlink()
    with pytest.raises(ModelError, match="no English voice"):
        loaded(ModelFolder(foreign, "foreign", "a test"))
