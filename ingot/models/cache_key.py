"""What computed KV depends on, as a key, and the disk cache that is opened under that key.

Stored KV is of no use with another model, tokenizer, number format, codec or device, so all of them are part of the
key. The model is identified by the bytes of its files; digests of large files are stored in an authenticated file and
computed again only when a file has changed.
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
from ingot.kernels.cpu import native
from ingot.models.adapter import ModelAdapter
from ingot.models.files.gguf_files import weight_files
from ingot.models.forward import kv_states_for

GB: Final = 1_000_000_000
READ_BYTES: Final = 1 << 22
FIRST_BYTES: Final = 1 << 20
SAMPLES: Final = 256
"""Of each file of weights, for a fingerprint."""
SAMPLE_BYTES: Final = 1 << 10


def open_disk_cache(
    settings: Settings, adapter: ModelAdapter, folder: Path, codec: PairCodec, part: str = ""
) -> DiskBackend | None:
    """None where no folder is named. `part` names this process's part of the model's KV, where others have the rest.
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
        return DiskBackend.of(RecordStore(where, key, limits, secret, model=folder.name))
    except OSError as error:
        raise unusable_folder_error(where, error) from error


def kv_key(adapter: ModelAdapter, folder: Path, codec: PairCodec) -> dict[str, str]:
    return _key_with_model(model_digest(folder), adapter, folder, codec)


def _key_with_model(digest: str, adapter: ModelAdapter, folder: Path, codec: PairCodec) -> dict[str, str]:
    return {
        "model": digest,
        "tokenizer": tokenizer_digest(folder),
        "number format": adapter.dtype,
        "codec": codec.described,
        **_live_codec_key(adapter),
        **({"lossy": ", ".join(adapter.lossy)} if adapter.lossy else {}),
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
    """The same, for KV that must be exactly what this server would compute. `digests` is a file with the digests of
    models' files, authenticated with `secret`; `part` names the part of one of several ranks."""
    formats = adapter.formats
    return _key_with_model(remembered_digest(folder, digests, secret), adapter, folder, codec) | {
        "states": f"weights {formats.weights}, activations {formats.activations}, states {formats.kv}",
        "layout": _layer_kinds(adapter),
        "head": "none" if adapter.head is None else f"{adapter.head.name}, {adapter.head.weight_bytes} bytes",
        "device": adapter.device.kind,
        **_arithmetic_key(adapter, deterministic=deterministic),
        **({"part": part} if part else {}),
    }


def _arithmetic_key(adapter: ModelAdapter, *, deterministic: bool) -> dict[str, str]:
    """What computes KV: other instruction sets give other last bits."""
    if adapter.device.kind != "cpu":
        return {"deterministic": str(deterministic).lower()}
    return {"arithmetic": native.arithmetic(deterministic=deterministic)}


def _live_codec_key(adapter: ModelAdapter) -> dict[str, str]:
    """The codec of the KV that later KV was computed from, and may be stored in."""
    if adapter.live is None:
        return {}
    return {"live codec": f"{adapter.live.described}, pages {PAGE_LAYOUT_VERSION} of {PAGE}"}


def _layer_kinds(adapter: ModelAdapter) -> str:
    """The layers' kinds, in order."""
    layers = kv_states_for(adapter.model, adapter.margin, adapter.kept, adapter.kernels)
    head_layers = [] if adapter.head is None else kv_states_for(adapter.head, 0, adapter.kept, adapter.kernels)
    kinds = (
        f"{state.kind}({state.window})" if isinstance(state, AppendState) and state.window else state.kind
        for state in flatten_states((*layers, *head_layers))
    )
    return " ".join(f"{kind}*{len(list(run))}" for kind, run in groupby(kinds))


@lru_cache(maxsize=8)
def model_digest(folder: Path) -> str:
    """Of the configuration and the weights. Reads all of them, once."""
    return _digest_of_files(_digested_files(folder))


def remembered_digest(folder: Path, memory: Path, secret: bytes) -> str:
    """The same, computed again only when a file has changed since: weights are large. `memory` is a file of digests,
    which may be missing or hold anything, and may fail to be written. Entries without a valid MAC are ignored."""
    name, signature = str(folder.resolve()), _signature(folder)
    try:
        entries = json.loads(memory.read_text())
        stored_signature, digest, mac = entries[name]
        if stored_signature == signature and compare_digest(str(mac), _mac(secret, name, signature, str(digest))):
            return str(digest)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        entries = {}
    found = model_digest(folder)
    part = memory.with_name(f".{memory.name}.{os.getpid()}.part")
    try:
        os.close(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600))
        entry = [signature, found, _mac(secret, name, signature, found)]
        part.write_text(json.dumps((entries if isinstance(entries, dict) else {}) | {name: entry}))
        part.replace(memory)
    except OSError:
        part.unlink(missing_ok=True)
    return found


def weights_fingerprint(folder: Path) -> str:
    """Of the configuration and the weights, without reading all of them: their files' beginnings, where tensors are
    listed, and samples all over them. It tells apart models that were trained differently; a file in which only few
    weights were changed may escape it."""
    whole = blake2b(digest_size=16)
    for file in _digested_files(folder):
        size = file.stat().st_size
        whole.update(size.to_bytes(8, "little"))
        with file.open("rb", buffering=0) as stream:
            whole.update(stream.read(FIRST_BYTES))
            for number in range(SAMPLES if size > FIRST_BYTES else 0):
                stream.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                whole.update(stream.read(SAMPLE_BYTES))
    return whole.hexdigest()


def _mac(secret: bytes, *values: object) -> str:
    return blake2b(json.dumps(values).encode(), key=secret, digest_size=32).hexdigest()


def _digested_files(folder: Path) -> list[Path]:
    elsewhere = [file for file in weight_files(folder) if file.parent != folder]
    return [folder / "config.json", *sorted(folder.glob("*.safetensors")), *elsewhere]


def _signature(folder: Path) -> list[list[int | str]]:
    stats = [(file.name, file.stat()) for file in _digested_files(folder)]
    return [[name, stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in stats]


@lru_cache(maxsize=8)
def tokenizer_digest(folder: Path) -> str:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
    return _digest_of_files([folder / name for name in names if (folder / name).is_file()])


def _digest_of_files(files: Iterable[Path]) -> str:
    whole = blake2b(digest_size=16)
    for file in files:
        whole.update(file.name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            while piece := stream.read(READ_BYTES):
                whole.update(piece)
    return whole.hexdigest()
