"""Whisper's weights: under Hugging Face's names, or as MLX's converters write them; plain, or packed in few bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models import checkpoint
from ingot.models.whisper import WhisperModel
from ingot.models.whisper_config import WhisperConfig, head_pairs
from ingot.models.whisper_names import hugging_face_name

UNNEEDED = (r"^proj_out\.",)
HEADS, POSITIONS = "alignment_heads", "encoder.embed_positions.weight"


def read_model(folder: Path) -> tuple[WhisperModel, WhisperConfig]:
    """The model in `folder`, of whose weights nothing is read before it is used. Raises ModelError."""
    config = WhisperConfig.read(folder)
    model = WhisperModel(config)
    found = checkpoint.renamed(checkpoint.read(folder), drop="model.")
    if any(".blocks." in name for name in found):
        found = _as_hugging_face(found, config)
        if (heads := found.pop(HEADS, None)) is not None:
            pairs = head_pairs(heads.tolist(), config.decoder_layers, config.decoder_heads, folder.name)
            config = replace(config, alignment_heads=pairs)
    if config.packing:
        _pack(model, found, config.packing, folder)
    checkpoint.give(model, found, unneeded=UNNEEDED, whose=folder.name)
    return model, config


def _as_hugging_face(found: Mapping[str, mx.array], config: WhisperConfig) -> dict[str, mx.array]:
    """MLX's convolutions have their inputs last, and positions of sound are computed where they are needed."""
    named = {hugging_face_name(name): tensor for name, tensor in found.items()}
    for name in ("encoder.conv1.weight", "encoder.conv2.weight"):
        if name in named and named[name].ndim == 3:
            named[name] = named[name].swapaxes(1, 2)
    return {POSITIONS: sinusoids(config.positions, config.width), **named}


def sinusoids(length: int, width: int) -> mx.array:
    """Of each position a sine and a cosine, in periods from 2 pi to 10,000 times that."""
    steps = mx.arange(width // 2) * (mx.log(mx.array(10_000.0)) / (width // 2 - 1))
    angles = mx.arange(length)[:, None] * mx.exp(-steps)
    return mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=1)


def _pack(model: nn.Module, found: Mapping[str, mx.array], packing: Mapping[str, Any], folder: Path) -> None:
    """Make those layers packed whose weights are."""
    own = {hugging_face_name(f"{path}."): told for path, told in packing.items() if isinstance(told, dict)}

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        taken = isinstance(module, nn.Linear) or path.endswith("embed_tokens")
        return own.get(f"{path}.", True) if taken and f"{path}.scales" in found else False

    try:
        nn.quantize(
            model, packing["group_size"], packing["bits"], mode=packing.get("mode", "affine"), class_predicate=how
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"The weights of {folder.name} are packed in a way that MLX does not know: {error}") from error
