"""Which model this is, by its files' bytes: what was computed with one is of no use to another."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path

from ingot.models.files.gguf_files import weight_files

_READ = 1 << 22


@lru_cache(maxsize=8)
def model_digest(folder: Path) -> str:
    """Of the configuration and the weights. Reads all of them, once."""
    return _digest(_files(folder))


def remembered_digest(folder: Path, memory: Path, secret: bytes) -> str:
    """The same, read again only when a file has changed since: weights are large. `memory` is a file of digests, which
    may be missing or hold anything, and cannot be relied on to be written. What is not sealed with `secret` is not
    believed."""
    name, signature = str(folder.resolve()), _signature(folder)
    try:
        known = json.loads(memory.read_text())
        said, digest, mac = known[name]
        if said == signature and compare_digest(str(mac), _sealed(secret, name, signature, str(digest))):
            return str(digest)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        known = {}
    found = model_digest(folder)
    part = memory.with_name(f".{memory.name}.{os.getpid()}.part")
    try:
        os.close(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600))
        entry = [signature, found, _sealed(secret, name, signature, found)]
        part.write_text(json.dumps((known if isinstance(known, dict) else {}) | {name: entry}))
        part.replace(memory)
    except OSError:
        part.unlink(missing_ok=True)
    return found


def _sealed(secret: bytes, *said: object) -> str:
    return blake2b(json.dumps(said).encode(), key=secret, digest_size=32).hexdigest()


def _files(folder: Path) -> list[Path]:
    beside = [file for file in weight_files(folder) if file.parent != folder]
    return [folder / "config.json", *sorted(folder.glob("*.safetensors")), *beside]


def _signature(folder: Path) -> list[list[int | str]]:
    files = _files(folder)
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in stats]


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
