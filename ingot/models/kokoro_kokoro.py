"""A Kokoro model behind one face: phonemes and a voice in, samples out. Only the engine thread may run one."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import BadRequest, ModelError
from ingot.media.mel import Floats
from ingot.models.kokoro import load_voice, load_weights
from ingot.models.kokoro_acoustic import Albert, TextEncoder
from ingot.models.kokoro_config import HARMONICS, MOST_FRAMES, RATE, KokoroConfig
from ingot.models.kokoro_prosody import Prosody
from ingot.models.kokoro_vocoder import Decoder
from ingot.models.pooling_models.encoder import weight_bytes

Speech: TypeAlias = "Generator[None, None, Floats]"


class KokoroModel(nn.Module):
    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.bert = Albert(config.bert)
        self.bert_encoder = nn.Linear(config.bert.width, config.width)
        self.predictor = Prosody(config)
        self.text_encoder = TextEncoder(config)
        self.decoder = Decoder(config)


def load_kokoro(folder: Path) -> Kokoro:
    """The model in `folder` and its voices, in float32: phases take no less. Raises ModelError."""
    config = KokoroConfig.read(folder)
    model = KokoroModel(config)
    load_weights(model, folder, config.packing)
    voices = {
        file.stem: load_voice(file, 2 * config.style) for file in sorted((folder / "voices").glob("*.safetensors"))
    }
    if not voices:
        raise ModelError(f"{folder.name} has no voices in voices/*.safetensors")
    mx.eval(model.parameters(), voices)
    return Kokoro(model, config, voices)


class Kokoro:
    rate = RATE
    dtype = "float32"

    def __init__(self, model: KokoroModel, config: KokoroConfig, voices: dict[str, mx.array]) -> None:
        self._model, self.config, self._voices = model, config, voices

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self._voices)

    @property
    def phonemes(self) -> frozenset[str]:
        """What it can be given."""
        return frozenset(self.config.phonemes)

    @property
    def context(self) -> int:
        """Most phonemes of one piece."""
        return self.config.bert.positions - 2

    def speak(self, phonemes: str, voice: str, speed: float) -> Speech:
        """Samples of one piece of text, from -1 to 1. The same phonemes are always spoken the same way."""
        known = self.config.phonemes
        tokens = mx.array([0, *(known[sign] for sign in phonemes), 0])
        styles = self._voices[voice]
        style = styles[min(max(len(phonemes) - 1, 0), styles.shape[0] - 1)]
        sounding, speaking = mx.split(style, 2)
        model = self._model
        states = yield from model.bert.run(tokens)
        states = yield from model.predictor.text_encoder.run(model.bert_encoder(states), speaking)
        durations = yield from model.predictor.durations(states, speed)
        which = self._spread(durations)
        pitch, loudness = yield from model.predictor.curves(states[which], speaking)
        text = yield from model.text_encoder.run(tokens)
        noise = mx.random.normal((which.shape[0] * self.config.frame, HARMONICS), key=mx.random.key(0))
        samples = yield from model.decoder.run(text[which], pitch, loudness, sounding, noise)
        return np.clip(np.array(samples), -1.0, 1.0)

    def _spread(self, durations: mx.array) -> mx.array:
        """Which phoneme each frame is of."""
        counts = np.array(durations)
        if counts.sum() > MOST_FRAMES:
            raise BadRequest(
                f"A part of the text would be spoken for {counts.sum() * self.config.frame / RATE:.0f} seconds without "
                "a pause, which is too long for one. Send shorter sentences, or a higher speed.",
                param="input",
            )
        return mx.array(np.repeat(np.arange(len(counts)), counts))

    def rest(self) -> None:
        """Nothing runs: give back the memory that mlx keeps for the next piece."""
        mx.clear_cache()

    @property
    def weight_bytes(self) -> int:
        return weight_bytes([self._model]) + sum(styles.nbytes for styles in self._voices.values())
