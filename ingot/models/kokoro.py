"""Kokoro, a text-to-speech model: phonemes and a voice in, samples of audio out.

`Kokoro` is the model behind one interface; only the engine thread may run one. Checkpoints are PyTorch's, as
safetensors, or those that mlx-audio writes. `load_kokoro` raises ModelError.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import BadRequest, ModelError
from ingot.media.audio import FloatArray
from ingot.models import checkpoint
from ingot.models.kokoro_acoustic import (
    HARMONICS,
    KOKORO_RATE,
    MOST_FRAMES,
    Albert,
    DoublingConvolution,
    KokoroConfig,
    KokoroConvolution,
    KokoroTextEncoder,
    ProsodyPredictor,
    UpsamplingConvolution,
)
from ingot.models.kokoro_vocoder import KokoroDecoder
from ingot.models.pooling_models.encoder import module_bytes

SpeechWork: TypeAlias = "Generator[None, None, FloatArray]"


class KokoroModel(nn.Module):
    def __init__(self, config: KokoroConfig) -> None:
        super().__init__()
        self.bert = Albert(config.bert)
        self.bert_encoder = nn.Linear(config.bert.width, config.width)
        self.predictor = ProsodyPredictor(config)
        self.text_encoder = KokoroTextEncoder(config)
        self.decoder = KokoroDecoder(config)


def load_kokoro(folder: Path) -> Kokoro:
    """The model in `folder` and its voices, in float32: phases take no less. Raises ModelError."""
    config = KokoroConfig.read(folder)
    model = KokoroModel(config)
    load_kokoro_weights(model, folder, config.quantization)
    voices = {
        file.stem: load_kokoro_voice(file, 2 * config.style)
        for file in sorted((folder / "voices").glob("*.safetensors"))
    }
    if not voices:
        raise ModelError(f"{folder.name} has no voices in voices/*.safetensors")
    mx.eval(model.parameters(), voices)
    return Kokoro(model, config, voices)


class Kokoro:
    rate = KOKORO_RATE
    dtype = "float32"

    def __init__(self, model: KokoroModel, config: KokoroConfig, voices: dict[str, mx.array]) -> None:
        self._model, self.config, self._voices = model, config, voices

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self._voices)

    @property
    def phonemes(self) -> frozenset[str]:
        """All that it supports."""
        return frozenset(self.config.phonemes)

    @property
    def context(self) -> int:
        """The most phonemes of one piece."""
        return self.config.bert.positions - 2

    def speak(self, phonemes: str, voice: str, speed: float) -> SpeechWork:
        """Samples of one piece of text, from -1 to 1. The same phonemes always give the same samples."""
        tokens = mx.array([0, *(self.config.phonemes[phoneme] for phoneme in phonemes), 0])
        styles = self._voices[voice]
        style = styles[min(max(len(phonemes) - 1, 0), styles.shape[0] - 1)]
        decoder_style, prosody_style = mx.split(style, 2)
        model = self._model
        states = yield from model.bert.run(tokens)
        states = yield from model.predictor.text_encoder.run(model.bert_encoder(states), prosody_style)
        durations = yield from model.predictor.durations(states, speed)
        which = self._frame_phonemes(durations)
        pitch, loudness = yield from model.predictor.curves(states[which], prosody_style)
        text = yield from model.text_encoder.run(tokens)
        noise = mx.random.normal((which.shape[0] * self.config.frame, HARMONICS), key=mx.random.key(0))
        samples = yield from model.decoder.run(text[which], pitch, loudness, decoder_style, noise)
        return np.clip(np.array(samples), -1.0, 1.0)

    def _frame_phonemes(self, durations: mx.array) -> mx.array:
        """Which phoneme each frame is of."""
        counts = np.array(durations)
        if counts.sum() > MOST_FRAMES:
            raise BadRequest(
                f"A part of the text would take {counts.sum() * self.config.frame / KOKORO_RATE:.0f} seconds of speech "
                "without a pause, which is too long. Send shorter sentences, or a higher speed.",
                param="input",
            )
        return mx.array(np.repeat(np.arange(len(counts)), counts))

    def rest(self) -> None:
        """Frees the memory that MLX caches for the next piece."""
        mx.clear_cache()

    @property
    def weight_bytes(self) -> int:
        return module_bytes([self._model]) + sum(styles.nbytes for styles in self._voices.values())


KOKORO_RENAMED = (
    (re.compile(r"^bert\.encoder\.embedding_hidden_mapping_in\."), "bert.embedding_projection."),
    (re.compile(r"^bert\.encoder\.albert_layer_groups\.0\.albert_layers\.0\."), "bert.layer."),
    (re.compile(r"\.duration_proj\.linear_layer\."), ".duration_proj."),
    (re.compile(r"\.module\."), "."),
    (re.compile(r"\.gamma$"), ".weight"),
    (re.compile(r"\.beta$"), ".bias"),
    (re.compile(r"\.W([xh])_forward$"), lambda found: f".weight_{'ih' if found[1] == 'x' else 'hh'}_l0"),
    (re.compile(r"\.W([xh])_backward$"), lambda found: f".weight_{'ih' if found[1] == 'x' else 'hh'}_l0_reverse"),
    (re.compile(r"\.bias_(ih|hh)_forward$"), r".bias_\1_l0"),
    (re.compile(r"\.bias_(ih|hh)_backward$"), r".bias_\1_l0_reverse"),
)
KOKORO_UNNEEDED = (
    r"position_ids$",
    r"^bert\.pooler\.",
    r"\.norm\.(weight|bias)$",
    r"^bert\..*attention\.(full|output)_dropout",
)


def load_kokoro_weights(model: nn.Module, folder: Path, quantization: Mapping[str, Any]) -> None:
    """Raises ModelError that names what is missing, unknown or of another shape."""
    found = {
        _current_tensor_name(name): tensor
        for name, tensor in _dequantized_tensors(
            checkpoint.read_checkpoint_tensors(folder), quantization, folder
        ).items()
    }
    filters = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, KokoroConvolution | UpsamplingConvolution | DoublingConvolution)
    }
    for name, module in filters.items():
        for key in (f"{name}.weight", f"{name}.weight_v"):
            if key in found:
                found[key] = _with_taps_last(found[key], module)
    found = _with_weight_norm(found)
    for name, module in filters.items():
        key = f"{name}.weight"
        if key in found and found[key].ndim == 3:
            found[key] = mx.contiguous(module.from_checkpoint(found[key]))
    for key in [name for name in found if name.endswith(".conv1x1.weight")]:
        found[key] = found[key].reshape(found[key].shape[0], -1)
    checkpoint.load_tensors(model, found, unneeded=KOKORO_UNNEEDED, whose=folder.name)


def load_kokoro_voice(file: Path, width: int) -> mx.array:
    """Styles by the number of phonemes, [lengths, width]. Raises ModelError."""
    try:
        tensors = mx.load(str(file))
    except RuntimeError as error:
        raise ModelError(f"The voice {file.name} cannot be read: it is damaged or no safetensors file") from error
    assert isinstance(tensors, dict)
    if len(tensors) != 1:
        raise ModelError(f"The voice {file.name} holds {len(tensors)} tensors instead of one")
    (styles,) = tensors.values()
    if styles.size == 0 or styles.size % width or styles.shape[-1] != width:
        raise ModelError(f"The voice {file.name} is of shape {tuple(styles.shape)}; its last axis has to be {width}")
    return styles.reshape(-1, width).astype(mx.float32)


def _current_tensor_name(name: str) -> str:
    for pattern, now in KOKORO_RENAMED:
        name = pattern.sub(now, name)
    return name


def _dequantized_tensors(
    found: Mapping[str, mx.array], quantization: Mapping[str, Any], folder: Path
) -> dict[str, mx.array]:
    """All in float32, those that mlx-audio quantised too."""
    result = {}
    for name, tensor in found.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in found and name != stem:
            try:
                form = {**quantization, **quantization.get(stem, {})}
                tensor = mx.dequantize(
                    tensor,
                    found[f"{stem}.scales"],
                    found.get(f"{stem}.biases"),
                    form["group_size"],
                    form["bits"],
                    form.get("mode", "affine"),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(
                    f"{name} of {folder.name} is quantised in a form that MLX does not support: {error}"
                ) from error
        if not name.endswith((".scales", ".biases")):
            result[name] = tensor.astype(mx.float32)
    return result


def _with_weight_norm(found: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """With weights instead of their directions and lengths, which weight normalisation stores."""
    result = {}
    for name, tensor in found.items():
        if name.endswith(".weight_v"):
            stem = name.removesuffix("_v")
            length = found.get(f"{stem}_g")
            if length is None:
                raise ModelError(f"The weights hold {name} and no {stem}_g")
            norm = mx.sqrt(mx.sum(mx.square(tensor), axis=(1, 2), keepdims=True))
            result[stem] = tensor * (length.reshape(-1, 1, 1) / norm)
        elif not name.endswith(".weight_g"):
            result[name] = tensor
    return result


def _with_taps_last(
    weight: mx.array, module: KokoroConvolution | UpsamplingConvolution | DoublingConvolution
) -> mx.array:
    """As PyTorch has it; mlx-audio swaps the last two axes."""
    if weight.ndim != 3 or module.from_checkpoint(weight).shape == module.weight.shape:
        return weight
    return mx.contiguous(weight.swapaxes(1, 2))
