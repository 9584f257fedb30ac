"""Kokoro-82M itself: what it speaks is heard again by whisper-tiny.en, with few words wrong.

Needs npm, whose packages hold the weights and the voices.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile

import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.config import Settings
from ingot.kernels.device import current_device
from ingot.media.audio import FloatArray
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import no_progress
from ingot.models.kokoro import Kokoro, load_kokoro
from ingot.models.whisper import load_whisper
from ingot.text.speech.phonemizer import Phonemizer
from ingot.text.tokenizer.whisper import WhisperVocabulary
from tests.engine.test_speech_to_text import transcribed
from tests.hearing import wav
from tests.models.test_kokoro import finished
from tests.oracle.kokoro_onnx import make_folder

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SHARDS = [f"kokoro-fp32{part}-shards@1.0.0" for part in "abc"]
VOICES = "kokoro-js@1.2.1"
TEXT = (
    "The old lighthouse keeper climbed the stairs every evening, and lit the lamp before the sun went down. "
    "He counted the boats that came home from the sea. Some nights there was nothing but the sound of the wind."
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Kokoro:
    folder = tmp_path_factory.mktemp("kokoro")
    for package in (*SHARDS, VOICES):
        if shutil.which("npm") is None or subprocess.run(["npm", "pack", package], cwd=folder, check=False).returncode:
            pytest.skip(f"{package} cannot be fetched")
    for archive in folder.glob("*.tgz"):
        with tarfile.open(archive) as held:
            held.extractall(folder, filter="data")
    parts = folder.glob("package/kokoro-fp32.part*.bin")
    ordered = sorted(parts, key=lambda part: int(re.findall(r"part(\d+)", part.name)[0]))
    onnx = b"".join(part.read_bytes() for part in ordered)
    return load_kokoro(make_folder(onnx, folder / "package" / "voices", folder / "kokoro-82m"))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def wrong(heard: list[str], said: list[str]) -> int:
    """Words to change, to leave out and to put in."""
    row = list(range(len(said) + 1))
    for at, word in enumerate(heard, 1):
        before, row[0] = row[0], at
        for place, wanted in enumerate(said, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (word != wanted))
    return row[-1]


@pytest.mark.parametrize("voice", ["af_heart", "bm_george"])
def test_what_is_spoken_is_heard_again(model: Kokoro, voice: str) -> None:
    pieces = Phonemizer(model.phonemes, model.context).pieces(TEXT, voice)
    spoken: list[FloatArray] = [finished(model.speak(piece, voice, 1.0))[0] for piece in pieces]
    folder = ensure_packaged_model("whisper-tiny.en", Settings(), no_progress)
    ears = load_whisper(folder, current_device())
    vocabulary = WhisperVocabulary.load(folder, ears.config.vocab)
    segments, _ = transcribed(ears, wav(np.concatenate(spoken), rate=model.rate), vocabulary=vocabulary)
    text = "".join(segment.text for segment in segments)
    assert wrong(words(text), words(TEXT)) <= 0.05 * len(words(TEXT)), text
