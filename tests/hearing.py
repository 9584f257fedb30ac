"""Ears that write what a test tells them, sounds to hear, and a vocabulary of bytes."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable, Generator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ingot.engine.speech_request import SpeechToTextCard
from ingot.engine.speech_to_text import ServedSpeechToText
from ingot.media.audio import SAMPLE_RATE, FloatArray
from ingot.models.whisper_convert import TASK_TOKENS, TIMESTAMP_COUNT, whisper_tokenizer
from ingot.text.tokenizer.whisper import WhisperVocabulary

LANGUAGES = 4
JOINED = (b" -", b" '", b" \xe2")
"""Beside the bytes: what begins the signs that are never written, so that a space is not among it."""
VOCAB = 256 + len(JOINED) + 2 + LANGUAGES + len(TASK_TOKENS) + TIMESTAMP_COUNT
CONTEXT = 448
SURE = 20.0
STATED = {
    "model_type": "whisper",
    **{"num_mel_bins": 80, "max_source_positions": 1500, "d_model": 16, "vocab_size": VOCAB},
    **{"max_target_positions": 24, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
    **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32},
}


def save_tokenizer(folder: Path) -> None:
    """Each byte is a token, and a few languages are known."""
    ranks = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *JOINED])}
    whisper_tokenizer(ranks, VOCAB).save(str(folder / "tokenizer.json"))


def save_ears(folder: Path) -> Path:
    """A tiny Whisper with random weights."""
    import mlx.core as mx

    from ingot.models.layers.modules import named_parameters
    from ingot.models.whisper import WhisperConfig, WhisperModel

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(STATED))
    mx.random.seed(5)
    model = WhisperModel(WhisperConfig.read(folder))
    weights = {f"model.{name}": 0.1 * mx.random.normal(weight.shape) for name, weight in named_parameters(model)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    save_tokenizer(folder)
    return folder


@cache
def vocabulary() -> WhisperVocabulary:
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        return WhisperVocabulary.load(Path(folder), VOCAB)


def timed(*parts: float | str) -> list[int]:
    """Tokens of texts, and of times in seconds."""
    known, tokens = vocabulary(), []
    for part in parts:
        tokens += known.encode(part) if isinstance(part, str) else [known.first_time + round(part * 50)]
    return tokens


class ScriptedWriting:
    """Writes what the ears were told, token by token, whatever came before."""

    def __init__(self, ears: ScriptedEars, script: Sequence[int], sureness: float) -> None:
        self.ears, self.script, self.sureness = ears, [*script, vocabulary().end], sureness
        self.length = 0
        self.pushed: list[int] = []

    def push(self, tokens: Sequence[int], asked: Sequence[int]) -> FloatArray:
        del self.pushed[self.length :]
        self.pushed += tokens
        self.length = len(self.pushed)
        self.ears.meanwhile()
        scores = np.zeros((len(asked), VOCAB), np.float32)
        if asked and vocabulary().start in self.pushed:
            begun = len(self.pushed) - 1 - self.pushed[::-1].index(vocabulary().start)
            at = max(0, self.length - begun - len(self.ears.opening))
            scores[-1, self.script[min(at, len(self.script) - 1)]] = self.sureness
            scores[0, vocabulary().silent] += self.ears.silence
        return scores

    def attention(self, tokens: Sequence[int]) -> Generator[None, None, FloatArray]:
        """Each token looks at a tenth of a second of its own."""
        yield
        looks = np.zeros((1, len(tokens), 1500), np.float32)
        for at in range(len(tokens)):
            looks[0, at, 5 * at : 5 * at + 5] = 10.0
        return looks


class ScriptedEars:
    """`scripts` are the tokens of one window after another; the last is written for all that follow."""

    context = CONTEXT

    def __init__(self, *scripts: Sequence[int], sureness: float = SURE, silence: float = 0.0, parts: int = 2) -> None:
        self.scripts, self.sureness, self.silence, self.parts = list(scripts), sureness, silence, parts
        self.opening = vocabulary().opening("en", "transcribe")
        self.windows: list[FloatArray] = []
        self.writings: list[ScriptedWriting] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.rested = 0

    def encode(self, frames: FloatArray) -> Generator[None, None, int]:
        self.windows.append(frames)
        for _ in range(self.parts):
            self.meanwhile()
            yield
        return len(self.windows) - 1

    def write(self, heard: int) -> ScriptedWriting:
        script = self.scripts[min(heard, len(self.scripts) - 1)]
        self.writings.append(ScriptedWriting(self, script, self.sureness))
        return self.writings[-1]

    def rest(self) -> None:
        self.rested += 1


def card(**told: Any) -> SpeechToTextCard:
    languages = tuple(vocabulary().languages)
    return SpeechToTextCard("toy-ears", "a script", languages, True, CONTEXT, "float32", 0, 1_700_000_000, **told)


def offered(ears: ScriptedEars) -> ServedSpeechToText:
    return ServedSpeechToText(card(), 80, vocabulary(), ears)


def tone(seconds: float, *, loudness: float = 0.3, rate: int = SAMPLE_RATE) -> FloatArray:
    return (loudness * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def wav(samples: FloatArray, *, rate: int = SAMPLE_RATE, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.repeat((samples * 32767).astype("<i2"), channels).tobytes())
    return file.getvalue()
