"""What a Whisper folder says of its model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import ModelError
from ingot.models.encoders.config import EncoderConfig
from ingot.models.pooling_models.loading import read_config
from ingot.models.whisper_names import hugging_face_config

WINDOW_POSITIONS = 1500
"""Of 30 seconds, as every Whisper model is trained with."""


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    mels: int
    positions: int  # of sound: half as many as frames of a window
    width: int
    vocab: int
    context: int  # most tokens that the decoder reads and writes
    encoder_layers: int
    encoder_heads: int
    encoder_inner: int
    decoder_layers: int
    decoder_heads: int
    decoder_inner: int
    alignment_heads: tuple[tuple[int, int], ...]  # [layer, head] of the attention that follows the sound in time
    packing: dict[str, Any] = field(default_factory=dict)  # bits and groups of packed weights

    @classmethod
    def read(cls, folder: Path) -> WhisperConfig:
        """Raises ModelError for a folder that holds another kind of model."""
        config = read_config(folder)
        if config.get("model_type") != "whisper":
            raise ModelError(
                f"{folder.name} is a model of type {config.get('model_type')!r}; what transcribes here is a Whisper "
                "model, such as whisper-tiny.en"
            )
        if "n_audio_state" in config:
            config |= _named(config, folder)
        stated = EncoderConfig(config)
        number = stated.number
        layers, positions = number("decoder_layers"), number("max_source_positions")
        if positions != WINDOW_POSITIONS:
            raise ModelError(
                f"{folder.name} hears {positions} positions at once; windows of sound have {WINDOW_POSITIONS} here"
            )
        return cls(
            mels=number("num_mel_bins"),
            positions=positions,
            width=number("d_model"),
            vocab=number("vocab_size"),
            context=number("max_target_positions"),
            encoder_layers=number("encoder_layers"),
            encoder_heads=number("encoder_attention_heads"),
            encoder_inner=number("encoder_ffn_dim"),
            decoder_layers=layers,
            decoder_heads=number("decoder_attention_heads"),
            decoder_inner=number("decoder_ffn_dim"),
            alignment_heads=_alignment_heads(folder, layers, number("decoder_attention_heads")),
            packing=stated.packing(),
        )

    @property
    def window_bytes(self) -> int:
        """Most memory that a window takes while it is heard and written down."""
        states = 4 * self.positions * self.width
        encoding = 12 * states + 8 * self.positions * self.encoder_inner
        scores = 3 * 4 * self.encoder_heads * self.positions * self.positions
        kept = 2 * self.decoder_layers * (states + 4 * self.context * self.width)
        return encoding + scores + kept + 16 * self.vocab


def _named(dims: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What MLX's converters state, in Hugging Face's names."""
    try:
        return hugging_face_config(dims)
    except (KeyError, TypeError) as error:
        raise ModelError(f"config.json of {folder.name} states no {error}") from error


def _alignment_heads(folder: Path, layers: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Those that the files name; else all of the upper half, as the reference does."""
    named = _generation_config(folder).get("alignment_heads")
    if named is None:
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    return head_pairs(named, layers, heads, folder.name)


def head_pairs(named: Any, layers: int, heads: int, whose: str) -> tuple[tuple[int, int], ...]:
    """Raises ModelError for what names no heads of the model."""
    try:
        found = tuple((int(layer), int(head)) for layer, head in named)
    except (TypeError, ValueError) as error:
        raise ModelError(f"alignment_heads of {whose} are no pairs of numbers") from error
    if not found or not all(0 <= layer < layers and 0 <= head < heads for layer, head in found):
        raise ModelError(f"alignment_heads of {whose} name heads that the model does not have")
    return found


def _generation_config(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"generation_config.json of {folder.name} cannot be read: {error}") from error
    return read if isinstance(read, dict) else {}
