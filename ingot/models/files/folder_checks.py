"""What a model folder claims of itself, held against its files before anything is built of it.

Building a model takes memory for every layer that the config names, and reading a pipe takes for ever, so both are
looked at beforehand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ingot.errors import ModelError
from ingot.models.files.gguf_files import references_in
from ingot.models.files.safetensors_header import read_header

READ: Final = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors")
CONFIG_BYTES: Final = 16 << 20
TOKENIZER_BYTES: Final = 512 << 20
LAYER_KEYS: Final = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_decoder_layers")
CONTEXT_KEYS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length"),
    "model_max_length",
)
UNSTATED_CONTEXT: Final = 8192
"""Context of a model whose config does not state one (recurrent models, mostly)."""


def check_folder(folder: Path, name: str) -> None:
    """Raises ModelError."""
    for file in sorted(folder.iterdir()):
        if file.suffix in READ and not file.is_dir() and not file.is_file():
            raise ModelError(f"{name}: {file.name} is no regular file")
    for told, most in (("config.json", CONFIG_BYTES), ("tokenizer.json", TOKENIZER_BYTES)):
        if (folder / told).is_file() and (folder / told).stat().st_size > most:
            raise ModelError(f"{name}: {told} is larger than any of a model is ({most >> 20} MiB)")
    _check_layers(folder, name)


def _check_layers(folder: Path, name: str) -> None:
    """Each layer has at least one tensor."""
    claimed = max(_layers(_config(folder, name)), default=0)
    if claimed <= 1:
        return
    elsewhere = references_in(folder)
    tensors = sum(len(read_header(file)) for file in sorted(folder.glob("model*.safetensors")))
    tensors += 0 if elsewhere is None else len(elsewhere.tensors)
    if claimed > tensors:
        raise ModelError(f"{name}: config.json claims {claimed} layers, and there are weights of {tensors} tensors")


def _config(folder: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError):
        raise ModelError(f"{name}: config.json is not valid JSON") from None
    except OSError as error:
        raise ModelError(f"{name}: config.json cannot be read: {error.strerror}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{name}: config.json is not a JSON object")
    return config


def _layers(config: dict[str, Any]) -> list[int]:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    stated = [part.get(key) for part in parts for key in LAYER_KEYS]
    return [value for value in stated if isinstance(value, int)]


def stated_context(config: dict[str, Any]) -> int:
    """How many tokens a model was made for. Raises ModelError."""
    for part in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            stated = part.get(key)
            if isinstance(stated, int):
                if stated < 1:
                    raise ModelError(f"config.json states a context of {stated} tokens in {key}")
                return stated
    return UNSTATED_CONTEXT
