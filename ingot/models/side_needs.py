"""What a model that does not generate takes in memory, told by its files before a weight of it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ingot.kernels.device import Device
from ingot.media import worker
from ingot.models.checkpoint import weight_files
from ingot.models.encoders.config import EncoderConfig
from ingot.models.files.folder_checks import stated_context
from ingot.models.files.safetensors_header import read_header
from ingot.models.kokoro_config import KokoroConfig
from ingot.models.kokoro_kokoro import KokoroModel
from ingot.models.layers.modules import parameters
from ingot.models.memory_needs import needs, settled_bytes
from ingot.models.pooling_models.encoder import trunk_batch_bytes
from ingot.models.pooling_models.loading import read_config
from ingot.models.whisper_checkpoint import read_model

BATCH_TOKENS: Final = 4096
"""Tokens of a batch that an encoder has memory for."""
LONGEST_INPUT: Final = 8192
"""Tokens of a single input that it has memory for, if it was made for so many."""


def hearing_needs(folder: Path, device: Device) -> int:
    """Bytes of a Whisper model, of what it holds while it hears a window, and of unpacking. Raises ModelError."""
    model, config = read_model(folder)
    return settled_bytes(model, device) + config.window_bytes + worker.headers.memory + worker.samples.memory


def speaking_needs(folder: Path, device: Device) -> int:
    """Bytes of a Kokoro model, which is float32 wherever it runs, and of a piece of speech. Raises ModelError."""
    config = KokoroConfig.read(folder)
    weights = sum(held.size for _, held in parameters(KokoroModel(config)))
    voices = [one for file in folder.glob("voices/*.safetensors") for one in read_header(file).values()]
    return 4 * (weights + sum(math.prod(one.shape) for one in voices)) + config.piece_bytes


def encoder_needs(folder: Path, device: Device) -> int:
    """Bytes of an encoder and of a batch. Raises ModelError."""
    config = read_config(folder)
    stated = EncoderConfig({**config, **(config.get("text_config") or {})})
    length = min(stated_context(config), LONGEST_INPUT)
    tokens = max(length, BATCH_TOKENS)
    batch = trunk_batch_bytes(
        tokens,
        length,
        hidden=stated.number("hidden_size"),
        inner=stated.number("intermediate_size"),
        heads=stated.number("num_attention_heads"),
    )
    decoder = needs(folder, device)
    if decoder is None:
        return _weights(folder, device) + batch
    return decoder.weights + batch + tokens * decoder.per_token


NEEDS: Final[dict[str, Callable[[Path, Device], int]]] = {
    "embedding": encoder_needs,
    "rerank": encoder_needs,
    "audio": hearing_needs,
    "speech": speaking_needs,
}
"""By the kinds of models."""


def _weights(folder: Path, device: Device) -> int:
    """The most that they take: a CPU may widen them."""
    tensors = [one for file in weight_files(folder) for one in read_header(file).values()]
    return sum(max(one.nbytes, 4 * math.prod(one.shape)) if device.kind == "cpu" else one.nbytes for one in tensors)
