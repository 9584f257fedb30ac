"""What a safetensors file holds, told by its header: no tensor is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.errors import ModelError

HEADER_BYTES: Final = 100 << 20  # as the format's own library has it
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that lies in a file."""

    file: Path
    name: str
    dtype: str  # as the format calls it: BF16, U32
    shape: tuple[int, ...]
    nbytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises ModelError if it is no safetensors file, or cut short."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > HEADER_BYTES:
                raise ModelError(f"{file.name} is no safetensors file")
            header = json.loads(stream.read(size))
            room = file.stat().st_size - 8 - size
        return {name: _stored(file, name, told, room) for name, told in header.items() if name != _METADATA}
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        raise ModelError(f"{file.name} is no safetensors file, or cut short") from None
    except OSError as error:
        raise ModelError(f"{file.name} cannot be read: {error.strerror}") from error


def _stored(file: Path, name: str, told: Any, room: int) -> StoredTensor:
    begin, end = told["data_offsets"]
    shape = tuple(told["shape"])
    if not 0 <= begin <= end <= room or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(name)
    return StoredTensor(file, name, str(told["dtype"]), shape, end - begin)
