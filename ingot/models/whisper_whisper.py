"""A Whisper model behind one face: windows of sound in, scores of tokens out. Only the engine thread may run one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from ingot.kernels import native
from ingot.kernels.device import Device
from ingot.media.mel import Floats
from ingot.models.layers.activations import swap_gelus
from ingot.models.layers.modules import parameters
from ingot.models.pooling_models.encoder import weight_bytes
from ingot.models.precision import settle
from ingot.models.whisper import WhisperModel
from ingot.models.whisper_checkpoint import read_model
from ingot.models.whisper_config import WhisperConfig

Heard: TypeAlias = "list[tuple[mx.array, mx.array]]"
"""Keys and values of a window, layer by layer."""

READ_AT_ONCE = 32
"""Tokens that are read between two looks at the clock."""


def load_whisper(folder: Path, device: Device, *, dtype: str | None = None) -> Whisper:
    """The model in `folder`. Raises ModelError with what is wrong with it."""
    model, config = read_model(folder)
    notes = settle(model, device, dtype)
    if native.available():
        swap_gelus(model)
    mx.eval(model.parameters())
    return Whisper(model, config, notes)


class Whisper:
    def __init__(self, model: WhisperModel, config: WhisperConfig, notes: Sequence[str] = ()) -> None:
        self._model, self.config, self.notes = model, config, tuple(notes)
        self.context = config.context

    def listen(self, frames: Floats) -> Generator[None, None, Heard]:
        """Hear a window of [2 * positions, mels] frames."""
        # What norms are kept in is what is computed in: weights may be narrower.
        dtype = self._model.encoder.layer_norm.weight.dtype
        sound = yield from self._model.encoder.run(mx.array(frames).astype(dtype))
        heard = []
        for pair in self._model.decoder.hear(sound):
            mx.eval(pair)
            heard.append(pair)
            yield
        return heard

    def write(self, heard: Heard) -> WhisperWriting:
        return WhisperWriting(self._model, self.config, heard)

    def rest(self) -> None:
        """Nothing runs: give back the memory that mlx keeps for the next window."""
        mx.clear_cache()

    @property
    def weight_bytes(self) -> int:
        return weight_bytes([self._model])

    @property
    def dtype(self) -> str:
        return str(max(parameters(self._model), key=lambda found: found[1].size)[1].dtype).rsplit(".", 1)[-1]

    @property
    def window_bytes(self) -> int:
        """Most memory that a window takes while it is heard and written down."""
        return self.config.window_bytes


class WhisperWriting:
    """A transcript of one window. Setting `length` to less forgets what was written since."""

    def __init__(self, model: WhisperModel, config: WhisperConfig, heard: Heard) -> None:
        self._decoder, self._config, self._heard = model.decoder, config, heard
        self._states = model.decoder.states(heard[0][0].dtype)

    @property
    def length(self) -> int:
        return self._states[0].length

    @length.setter
    def length(self, length: int) -> None:
        for states in self._states:
            states.length = length

    def push(self, tokens: Sequence[int], asked: Sequence[int]) -> Floats:
        """Write tokens down. What may follow those of the places `asked`, among these, [asked, vocabulary]."""
        hidden = self._decoder.hidden(mx.array(list(tokens)), self._states, self._heard)
        if not asked:
            mx.eval(hidden)
            return np.zeros((0, self._config.vocab), np.float32)
        return np.array(self._decoder.logits(hidden[mx.array(list(asked))]))

    def attention(self, tokens: Sequence[int]) -> Generator[None, None, Floats]:
        """How tokens look at the sound, in the heads that follow it: [heads, tokens, positions]."""
        self.length = 0
        parts: list[Any] = []
        for begin in range(0, len(tokens), READ_AT_ONCE):
            looks: list[mx.array] = []
            self._decoder.hidden(mx.array(list(tokens[begin : begin + READ_AT_ONCE])), self._states, self._heard, looks)
            parts.append(np.stack([np.array(looks[layer][head]) for layer, head in self._config.alignment_heads]))
            yield
        return np.concatenate(parts, axis=1)
