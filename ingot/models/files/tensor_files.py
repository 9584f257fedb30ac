"""Writes safetensors files one tensor at a time, so that converting a model never holds more than one of them.

The header comes first in the file but is known last; room for it is kept at the front and filled in at the end,
padded with the spaces that the format allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

SHARD_BYTES = 4 << 30
ENTRY_ROOM = 128  # bytes of header for one tensor, besides its name

_DTYPES = {"float32": "F32", "float16": "F16", "uint32": "U32", "uint8": "U8"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array ready to be written. `bfloat16` says that the uint16 array holds bfloat16 numbers."""

    name: str
    array: np.ndarray
    bfloat16: bool = False

    @property
    def dtype(self) -> str:
        return "BF16" if self.bfloat16 else _DTYPES[self.array.dtype.name]


@dataclass(slots=True)
class _Shard:
    stream: BinaryIO
    path: Path
    room: int
    entries: dict[str, dict[str, object]] = field(default_factory=dict)
    size: int = 0

    def add(self, tensor: Tensor) -> None:
        data = np.ascontiguousarray(tensor.array)
        begin, self.size = self.size, self.size + data.nbytes
        self.entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(data.shape),
            "data_offsets": [begin, self.size],
        }
        self.stream.write(data.data)

    def close(self) -> None:
        header = json.dumps({"__metadata__": {"format": "mlx"}, **self.entries}, separators=(",", ":")).encode()
        if len(header) > self.room:
            raise ValueError("the safetensors header outgrew the room kept for it")
        self.stream.seek(0)
        self.stream.write(self.room.to_bytes(8, "little") + header.ljust(self.room))
        self.stream.close()


def write_weights(
    folder: Path, groups: Iterable[list[Tensor]], names: list[str], shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes model.safetensors, or numbered parts and their index where it would be larger than `shard_bytes`.

    `groups` are tensors that belong together (a layer's packed weight, scales and biases) and are written as they
    come; `names` are all the names that may come.
    """
    room = -(-(64 + sum(len(name) + ENTRY_ROOM for name in names)) // 8) * 8
    shards: list[_Shard] = []
    try:
        for group in groups:
            incoming = sum(tensor.array.nbytes for tensor in group)
            if not shards or (shards[-1].size and shards[-1].size + incoming > shard_bytes):
                shards.append(_open_shard(folder, len(shards), room))
            for tensor in group:
                shards[-1].add(tensor)
        for shard in shards:
            shard.close()
    finally:
        for shard in shards:
            shard.stream.close()
    _name_shards(folder, shards)


def _open_shard(folder: Path, number: int, room: int) -> _Shard:
    path = folder / f"part-{number}.safetensors"
    stream = path.open("wb")
    stream.seek(8 + room)
    return _Shard(stream, path, room)


def _name_shards(folder: Path, shards: list[_Shard]) -> None:
    if len(shards) == 1:
        shards[0].path.rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard.path.rename(folder / name)
        places |= dict.fromkeys(shard.entries, name)
    index = {"metadata": {"total_size": sum(shard.size for shard in shards)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
