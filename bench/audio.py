"""Speech-to-text: its speed relative to real time, alone and alongside a chat stream, and the memory for an hour of it.

python -m bench.audio speech.wav                       the packaged models
python -m bench.audio speech.wav --model FOLDER --audio-model FOLDER
python -m bench.audio speech.wav --hours 1             the file over and over; memory above the loaded models

Alongside a stream, times are milliseconds between two of its tokens, before and during the transcription. The target is
that of --target-itl-ms.
"""

from __future__ import annotations

import argparse
import io
import queue
import sys
import threading
import time
import wave
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from bench.pictures import Gaps, Reader, asked, gaps
from ingot.config import DEFAULT_MODEL, Settings, single_model_entries
from ingot.engine.engine import Engine, SpeechToTextEngine
from ingot.engine.loading.model_loader import ModelLoader
from ingot.engine.speech_request import Segment, TranscriptEvent, TranscriptionEnded, TranscriptionRequest
from ingot.media.audio import SAMPLE_RATE, AudioFile
from ingot.models.files.progress import no_progress

EARS = "whisper-tiny.en"
LOOK_S = 0.2


@dataclass(frozen=True)
class Heard:
    seconds: float  # of sound
    took: float
    first: float  # until the first segment was told
    text: str

    def __str__(self) -> str:
        return (
            f"{self.seconds:.1f} s in {self.took:.1f} s: {self.seconds / self.took:.1f}x; first text {self.first:.2f} s"
        )


def heard(engine: SpeechToTextEngine, file: bytes, name: str) -> Heard:
    events: queue.SimpleQueue[list[TranscriptEvent]] = queue.SimpleQueue()
    began, first, said = time.monotonic(), None, list[str]()
    engine.transcribe_to(TranscriptionRequest(name, AudioFile(file)), events.put)
    while True:
        for event in events.get():
            if isinstance(event, Segment):
                first = first or time.monotonic() - began
                said.append(event.text)
            elif isinstance(event, TranscriptionEnded):
                took = time.monotonic() - began
                return Heard(event.seconds, took, first or took, "".join(said).strip())
            else:
                raise event


def beside(engine: Engine, ears: SpeechToTextEngine, file: bytes, alone_s: float) -> tuple[Gaps, Gaps, Heard]:
    """The gaps of a stream alone, and while a sound is heard."""
    reader = Reader(engine, asked("stream", [5, 6, 7]))
    reader.wait()
    began = time.monotonic()
    time.sleep(alone_s)
    middle = time.monotonic()
    found = heard(ears, file, "beside")
    end = time.monotonic()
    reader.close(engine)
    return gaps([reader], began, middle), gaps([reader], middle, end), found


class Memory(threading.Thread):
    """Looks now and then how much the process holds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.rest = self.most = resident()
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            self.most = max(self.most, resident())

    def stop(self) -> int:
        """Bytes above what was held at the beginning."""
        self._over.set()
        self.join()
        return self.most - self.rest


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def repeated(sound: AudioFile, hours: float) -> bytes:
    """The sound over and over, as one file."""
    once = np.concatenate(list(sound.samples()))
    spoken = (once * 32767).astype("<i2").tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        for _ in range(max(1, round(hours * 3600 * SAMPLE_RATE / len(once)))):
            out.writeframes(spoken)
    return file.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--audio-model", default=EARS)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--alone", type=float, default=3.0, help="seconds for which the stream is measured alone")
    arguments = parser.parse_args()
    settings = Settings(memory="4GB", context=8192)
    settings = replace(settings, model=arguments.model, audio_model=arguments.audio_model)
    loader = ModelLoader(settings, single_model_entries(settings))
    engine, ears = (engine for _, engine in loader.load_resident(no_progress))
    assert isinstance(engine, Engine) and isinstance(ears, SpeechToTextEngine)
    try:
        file = arguments.file.read_bytes()
        if arguments.hours:
            long = repeated(AudioFile(file), arguments.hours)
            memory = Memory()
            memory.start()
            heard(ears, file, "warm-up")
            found = heard(ears, long, "long")
            print(f"long    {found}\nmemory  {memory.stop() / 1e6:.0f} MB in addition to the weights, without the file")
            return 0
        heard(ears, file, "warm-up")
        print(f"alone   {heard(ears, file, 'alone')}")
        before, during, found = beside(engine, ears, file, arguments.alone)
        print(f"beside  {found}")
        print(f"stream alone   {before}\nstream beside  {during}")
    finally:
        loader.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
