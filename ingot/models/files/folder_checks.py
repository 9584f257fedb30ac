"""Checks a model folder before anything is built from it.

Building a model takes memory for every layer that the config names, and reading a pipe never ends, so both are checked
first. The contents of safetensors files are read from their headers: no tensor is read. Imports nothing heavy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.errors import ModelError
from ingot.models.files.gguf_files import references_in

READ_SUFFIXES: Final = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors")
CONFIG_BYTES: Final = 16 << 20
TOKENIZER_BYTES: Final = 512 << 20
LAYER_KEYS: Final = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_decoder_layers")
CONTEXT_KEYS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length"),
    "model_max_length",
)
UNSTATED_CONTEXT: Final = 8192
"""Context of a model whose config does not state one (recurrent models, mostly)."""
HEADER_BYTES: Final = 100 << 20  # the limit of the format's own library
_METADATA: Final = "__metadata__"


def check_model_folder(folder: Path, name: str) -> None:
    """Raises ModelError."""
    for file in sorted(folder.iterdir()):
        if file.suffix in READ_SUFFIXES and not file.is_dir() and not file.is_file():
            raise ModelError(f"{name}: {file.name} is no regular file")
    for file, most in ((folder / "config.json", CONFIG_BYTES), (folder / "tokenizer.json", TOKENIZER_BYTES)):
        if file.is_file() and file.stat().st_size > most:
            raise ModelError(f"{name}: {file.name} is larger than the most that is allowed ({most >> 20} MiB)")
    _check_layers(folder, name)


def _check_layers(folder: Path, name: str) -> None:
    """Each layer has at least one tensor."""
    claimed = max(_stated_layers(_read_config(folder, name)), default=0)
    if claimed <= 1:
        return
    elsewhere = references_in(folder)
    tensors = sum(len(read_safetensors_header(file)) for file in sorted(folder.glob("model*.safetensors")))
    tensors += 0 if elsewhere is None else len(elsewhere.tensors)
    if claimed > tensors:
        raise ModelError(f"{name}: config.json claims {claimed} layers, and there are weights of {tensors} tensors")


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError):
        raise ModelError(f"{name}: config.json is not valid JSON") from None
    except OSError as error:
        raise ModelError(f"{name}: config.json cannot be read: {error.strerror}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{name}: config.json is not a JSON object")
    return config


def _stated_layers(config: dict[str, Any]) -> list[int]:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    stated = [part.get(key) for part in parts for key in LAYER_KEYS]
    return [value for value in stated if isinstance(value, int)]


def stated_context(config: dict[str, Any]) -> int:
    """The context length of a model's config. Raises ModelError."""
    for part in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            stated = part.get(key)
            if isinstance(stated, int):
                if stated < 1:
                    raise ModelError(f"config.json states a context of {stated} tokens in {key}")
                return stated
    return UNSTATED_CONTEXT


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    name: str
    dtype: str  # by the format's names: BF16, U32
    shape: tuple[int, ...]
    nbytes: int
    offset: int  # in the file


EXPERT_RECORDS: Final = "expert_records"
"""What ends the name of a tensor [experts, bytes] that has all arrays of each expert of a layer."""
RECORD_LAYOUT: Final = "expert_records"
"""In a file's metadata: by the layer's name, [projection, array, dtype, shape] of each array of a record."""


def read_safetensors_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises ModelError if it is no safetensors file, or cut short."""
    return _read_header(file)[0]


def read_record_layout(file: Path) -> dict[str, list[tuple[str, str, str, list[int]]]]:
    """Of the records in a file. Raises ModelError."""
    layout: dict[str, list[tuple[str, str, str, list[int]]]] = _read_header(file)[1]
    return layout


def _read_header(file: Path) -> tuple[dict[str, StoredTensor], Any]:
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > HEADER_BYTES:
                raise ModelError(f"{file.name} is no safetensors file")
            header = json.loads(stream.read(size))
            room = file.stat().st_size - 8 - size
        layout = json.loads((header.pop(_METADATA, None) or {}).get(RECORD_LAYOUT, "{}"))
        return {name: _stored_tensor(file, name, entry, 8 + size, room) for name, entry in header.items()}, layout
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        raise ModelError(f"{file.name} is no safetensors file, or cut short") from None
    except OSError as error:
        raise ModelError(f"{file.name} cannot be read: {error.strerror}") from error


def _stored_tensor(file: Path, name: str, entry: Any, data: int, room: int) -> StoredTensor:
    """`data` is where the tensors begin, and `room` how many bytes there are from there on."""
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not 0 <= begin <= end <= room or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(name)
    return StoredTensor(file, name, str(entry["dtype"]), shape, end - begin, data + begin)
