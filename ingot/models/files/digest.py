"""Which model this is, by its files' bytes: what was computed with one is of no use to another."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

_READ = 1 << 22


@lru_cache(maxsize=8)
def model_digest(folder: Path) -> str:
    """Of the configuration and the weights. Reads all of them, once."""
    return _digest([folder / "config.json", *sorted(folder.glob("*.safetensors"))])


@lru_cache(maxsize=8)
def tokenizer_digest(folder: Path) -> str:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
    return _digest([folder / name for name in names if (folder / name).is_file()])


def _digest(files: Iterable[Path]) -> str:
    whole = blake2b(digest_size=16)
    for file in files:
        whole.update(file.name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as held:
            while piece := held.read(_READ):
                whole.update(piece)
    return whole.hexdigest()
