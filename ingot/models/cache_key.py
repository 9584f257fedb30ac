"""What computed KV depends on, as a key, and the disk cache that is opened under that key.

Whoever has another model, tokenizer, number format, codec or device can do nothing with stored KV: so all of them are
part of the key. Which model this is, is told by the bytes of its files; digests of large files are remembered in a
sealed file and computed again only when a file has changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from itertools import groupby
from pathlib import Path
from typing import Final

from ingot.cache.attention_state import AppendState, flatten_states
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.coded_pages import PAGE_LAYOUT_VERSION
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.store import DIGESTS_FILE, DiskLimits, RecordStore, folder_secret, unusable_folder_error
from ingot.cache.pages import PAGE
from ingot.config import Settings
from ingot.models.adapter import ModelAdapter
from ingot.models.files.gguf_files import weight_files
from ingot.models.forward import kv_states_for

GB: Final = 1_000_000_000


def open_disk_cache(
    settings: Settings, adapter: ModelAdapter, folder: Path, codec: PairCodec, part: str = ""
) -> DiskBackend | None:
    """None where no folder is named. `part` says which of a model's states are this process's, where it has some alone.
    Raises ConfigError where the folder cannot be used."""
    where = settings.cache_dir
    if where is None:
        return None
    secret = folder_secret(where, settings.archive_key_file)
    limits = DiskLimits(
        int(settings.cache_disk_gb * GB), int(settings.cache_disk_free_gb * GB), settings.cache_disk_sync
    )
    try:
        exact = settings.deterministic
        key = exact_kv_key(adapter, folder, codec, where / DIGESTS_FILE, secret, deterministic=exact, part=part)
        return DiskBackend.of(RecordStore(where, key, limits, secret))
    except OSError as error:
        raise unusable_folder_error(where, error) from error


def kv_key(adapter: ModelAdapter, folder: Path, codec: PairCodec) -> dict[str, str]:
    return {
        "model": model_digest(folder),
        "tokenizer": tokenizer_digest(folder),
        "number format": adapter.dtype,
        "codec": codec.described,
        **_live_codec_key(adapter),
    }


def exact_kv_key(
    adapter: ModelAdapter,
    folder: Path,
    codec: PairCodec,
    digests: Path,
    secret: bytes,
    *,
    deterministic: bool,
    part: str = "",
) -> dict[str, str]:
    """The same, for states that are to be the very ones that this server would compute. `digests` is a file that
    remembers what models' files were found to be, sealed with `secret`; `part` says which of the states these are, of
    several ranks'."""
    return {
        "model": remembered_digest(folder, digests, secret),
        "tokenizer": tokenizer_digest(folder),
        "number format": adapter.dtype,
        "codec": codec.described,
        **_live_codec_key(adapter),
        "states": str(adapter.formats),
        "layout": _layer_kinds(adapter),
        "head": "none" if adapter.head is None else f"{adapter.head.name}, {adapter.head.weight_bytes} bytes",
        "device": adapter.device.kind,
        "deterministic": str(deterministic).lower(),
        **({"part": part} if part else {}),
    }


def _live_codec_key(adapter: ModelAdapter) -> dict[str, str]:
    """What states were computed from, and may lie in, where that is not the very ones before them."""
    return (
        {}
        if adapter.live is None
        else {"live codec": f"{adapter.live.described}, pages {PAGE_LAYOUT_VERSION} of {PAGE}"}
    )


def _layer_kinds(adapter: ModelAdapter) -> str:
    """The layers' kinds, in order."""
    layers = kv_states_for(adapter.model, adapter.margin, adapter.kept, adapter.kernels)
    beside = [] if adapter.head is None else kv_states_for(adapter.head, 0, adapter.kept, adapter.kernels)
    kinds = (
        f"{state.kind}({state.window})" if isinstance(state, AppendState) and state.window else state.kind
        for state in flatten_states((*layers, *beside))
    )
    return " ".join(f"{kind}*{len(list(run))}" for kind, run in groupby(kinds))


_READ_BYTES = 1 << 22


@lru_cache(maxsize=8)
def model_digest(folder: Path) -> str:
    """Of the configuration and the weights. Reads all of them, once."""
    return _digest_of_files(_digested_files(folder))


def remembered_digest(folder: Path, memory: Path, secret: bytes) -> str:
    """The same, read again only when a file has changed since: weights are large. `memory` is a file of digests, which
    may be missing or hold anything, and cannot be relied on to be written. What is not sealed with `secret` is not
    believed."""
    name, signature = str(folder.resolve()), _signature(folder)
    try:
        known = json.loads(memory.read_text())
        said, digest, mac = known[name]
        if said == signature and compare_digest(str(mac), _seal(secret, name, signature, str(digest))):
            return str(digest)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        known = {}
    found = model_digest(folder)
    part = memory.with_name(f".{memory.name}.{os.getpid()}.part")
    try:
        os.close(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600))
        entry = [signature, found, _seal(secret, name, signature, found)]
        part.write_text(json.dumps((known if isinstance(known, dict) else {}) | {name: entry}))
        part.replace(memory)
    except OSError:
        part.unlink(missing_ok=True)
    return found


def _seal(secret: bytes, *said: object) -> str:
    return blake2b(json.dumps(said).encode(), key=secret, digest_size=32).hexdigest()


def _digested_files(folder: Path) -> list[Path]:
    beside = [file for file in weight_files(folder) if file.parent != folder]
    return [folder / "config.json", *sorted(folder.glob("*.safetensors")), *beside]


def _signature(folder: Path) -> list[list[int | str]]:
    files = _digested_files(folder)
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in stats]


@lru_cache(maxsize=8)
def tokenizer_digest(folder: Path) -> str:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
    return _digest_of_files([folder / name for name in names if (folder / name).is_file()])


def _digest_of_files(files: Iterable[Path]) -> str:
    whole = blake2b(digest_size=16)
    for file in files:
        whole.update(file.name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as held:
            while piece := held.read(_READ_BYTES):
                whole.update(piece)
    return whole.hexdigest()
