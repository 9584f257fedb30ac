"""From a user's name of a model to a folder that can be loaded, and to the model's kind.

A name is, in this order: a packaged model, a path (folder or .gguf file), a model in the model store, a short name of
one on the hub (`short_names`), a hub id, one with a quantisation of a GGUF file (org/name:Q4_K_M), a unique prefix of a
name in the store. `locate_model` raises ModelError that says what to do.

The kind of a model (chat, embedding, rerank, audio, speech) is found from its files. Imports nothing heavy: a lazy
server needs it before it is ready.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.config import Settings
from ingot.errors import ModelError, nearest_name
from ingot.models.files import hub, packaged
from ingot.models.files.folder_checks import check_model_folder
from ingot.models.files.gguf_files import gguf_part_name, gguf_parts_of, references_in
from ingot.models.files.model_store import (
    HASH_LETTERS,
    StoredModel,
    find_stored_model,
    find_stored_model_by_prefix,
    list_stored_models,
    store_model,
)
from ingot.models.files.progress import Progress
from ingot.models.files.short_names import NAMED_MODELS, find_named_model, full_model_name

EDGE_BYTES = 1 << 20  # how much of a file's beginning and end goes into its fingerprint
CHAT_KIND: Final = "chat"
HEADLESS_SUFFIXES: Final = ("Model", "ForMaskedLM")
"""Of architectures without a head that generates or classifies."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with config.json, safetensors weights and a tokenizer."""

    path: Path
    name: str  # the short name that it is served under
    source: str  # where it came from, without paths of this machine


def locate_model(name: str, settings: Settings, progress: Progress, *, in_place: bool = False) -> ModelFolder:
    """Finds the model, fetching or converting it where needed. Raises ModelError that says what to do.

    `in_place`: weights may stay in a GGUF file that they are in, where this machine uses them as they are there.
    """
    in_place = in_place and settings.ranks == 1
    model = packaged.find_packaged_model(name)
    if model is not None:
        path = packaged.ensure_packaged_model(model.name, settings, progress)
        return ModelFolder(path, model.name, model.origin["source"])
    path = Path(name).expanduser()
    if path.exists():
        return _local_model(path, settings, progress, in_place)
    if _looks_like_path(name):
        raise ModelError(f"there is no file or folder {name!r}")
    if stored := find_stored_model(name, settings.models_dir):
        return _stored_model(stored, settings, progress, in_place)
    if wanted := hub.split_gguf_id(name):
        path = hub.fetch_gguf_from_hub(*wanted, settings, progress)
        return ModelFolder(_converted_gguf(path, settings, progress, in_place), _gguf_stem(path), f"hub:{name}")
    if hub.is_hub_id(hub_id := full_model_name(name)):
        path = _checked_folder(hub.fetch_from_hub(hub_id, settings, progress), hub_id)
        own_name = name.lower() if hub_id != name else name.partition("/")[2]
        return ModelFolder(path, own_name, f"hub:{hub_id}")
    if stored := find_stored_model_by_prefix(name, settings.models_dir):
        return _stored_model(stored, settings, progress, in_place)
    raise ModelError(_unknown_model_message(name, settings))


def _local_model(path: Path, settings: Settings, progress: Progress, in_place: bool) -> ModelFolder:
    path = path.absolute()
    if path.is_dir():
        folder = _folder_with_weights(_checked_folder(path, path.name), settings, progress, in_place)
        return ModelFolder(folder, path.resolve().name, f"folder:{path.resolve().name}")
    if path.suffix.lower() == ".gguf" and path.is_file():
        return ModelFolder(_converted_gguf(path, settings, progress, in_place), _gguf_stem(path), f"gguf:{path.name}")
    raise ModelError(f"{path.name} is neither a model folder nor a .gguf file")


def _stored_model(stored: StoredModel, settings: Settings, progress: Progress, in_place: bool) -> ModelFolder:
    return ModelFolder(_folder_with_weights(stored.path, settings, progress, in_place), stored.name, stored.source)


def _folder_with_weights(folder: Path, settings: Settings, progress: Progress, in_place: bool) -> Path:
    """`folder`, or where its weights cannot stay in a GGUF file, the one that the file is converted to."""
    references = references_in(folder)
    if references is None:
        return folder
    references.check()
    return folder if in_place else _converted_gguf(Path(references.files[0].path), settings, progress, in_place)


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.lower().endswith(".gguf")


def _checked_folder(folder: Path, name: str) -> Path:
    """`folder`, if it is one that can be loaded."""
    ggufs = sorted(file.name for file in folder.glob("*.gguf"))
    hint = f"; it holds {ggufs[0]}, give that file instead" if ggufs else ""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} has no config.json, so it is no model folder{hint}")
    if not any(folder.glob("model*.safetensors")) and not any(folder.glob("kokoro*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        reason = " (pickled weights can run code and are not loaded)" if pickled else ""
        raise ModelError(f"{name} has no weights in model*.safetensors{reason}{hint}")
    check_model_folder(folder, name)
    return folder


def _converted_gguf(path: Path, settings: Settings, progress: Progress, in_place: bool) -> Path:
    """The folder in the model store that a .gguf file was converted to; converted now if it is not there.

    Where the native kernels use weights as they are in the file, only what else a model needs is converted. A copy of
    all of them that an earlier start made goes then.
    """
    from ingot.kernels.cpu import native
    from ingot.models.gguf.importer import convert_gguf

    parts = gguf_parts_of(path)
    origin = _fingerprint(parts)
    in_place = in_place and native.installed()
    if in_place:
        origin["in_place"] = [str(part.resolve()) for part in parts]
    stem = re.sub(r"[^\w.-]+", "-", _gguf_stem(path)).strip(".-") or "model"
    folder = settings.models_dir.expanduser() / f"{stem}-{origin['sha256'][:HASH_LETTERS]}"
    return store_model(folder, origin, lambda target: convert_gguf(path, target, progress, in_place=in_place), progress)


def _gguf_stem(path: Path) -> str:
    """What a file is called, whichever part of a model it is."""
    part = gguf_part_name(path.name)
    return part.stem if part else path.stem


def _fingerprint(parts: list[Path]) -> dict[str, Any]:
    """Tells changed files apart without reading gigabytes: names, sizes, times, and both ends of each."""
    digest, newest = hashlib.sha256(), 0
    for path in parts:
        try:
            with path.open("rb") as stream:
                status = path.stat()
                digest.update(f"{path.name}\0{status.st_size}\0".encode())
                digest.update(stream.read(EDGE_BYTES))
                stream.seek(max(0, status.st_size - EDGE_BYTES))
                digest.update(stream.read(EDGE_BYTES))
                newest = max(newest, status.st_mtime_ns)
        except OSError as error:
            raise ModelError(f"{path.name} cannot be read: {error.strerror or error}") from error
    return {"source": f"gguf:{parts[0].name}", "sha256": digest.hexdigest(), "mtime_ns": newest}


def _unknown_model_message(name: str, settings: Settings) -> str:
    stored = [model.name for model in list_stored_models(settings.models_dir)]
    names = list(dict.fromkeys([*packaged.packaged_model_names(), *stored]))
    near = nearest_name(name.lower(), [*names, *(model.name for model in NAMED_MODELS)])
    hint = f" Did you mean {near!r}?" if near else ""
    return (
        f"there is no model {name!r}.{hint} Known by name: {', '.join(names)}; `ingot models --recommend` shows more. "
        "Otherwise give a model folder, a .gguf file, or a hub id such as org/name."
    )


def model_kind(name: str, settings: Settings) -> str:
    """Of a model by the user's name (see `locate_model`); chat for one that is not here yet."""
    model = packaged.find_packaged_model(name)
    if model is not None:
        return model.kind
    folder = local_model_folder(name, settings)
    named = find_named_model(name)
    if named is not None and folder in (None, hub.cached_hub_folder(named.hub_id)):
        return named.kind  # which is not always seen in the files
    return CHAT_KIND if folder is None else model_kind_in(folder)


def model_kind_in(folder: Path) -> str:
    """Of a model folder; chat where its files do not say: loading reports what is wrong."""
    config = config_or_empty(folder)
    if config.get("model_type") == "whisper":
        return "audio"
    if "istftnet" in config:  # of Kokoro
        return "speech"
    stated = config.get("architectures")
    architectures = [str(each) for each in stated] if isinstance(stated, list) else []
    if any(each.endswith("ForSequenceClassification") for each in architectures):
        return "rerank"
    if (folder / "modules.json").is_file():  # of sentence-transformers
        return "embedding"
    return (
        "embedding" if architectures and all(each.endswith(HEADLESS_SUFFIXES) for each in architectures) else CHAT_KIND
    )


def has_vision(name: str, settings: Settings) -> bool:
    """Whether a local model has a vision tower that would be loaded."""
    folder = (
        None
        if settings.text_only or packaged.find_packaged_model(name) is not None
        else local_model_folder(name, settings)
    )
    from ingot.media.image_processors import PROCESSORS, states_vision

    if folder is None and (named := find_named_model(name)) is not None:  # so that it is said before it is fetched
        return not settings.text_only and "vision" in named.tasks and named.family in PROCESSORS
    config = {} if folder is None else config_or_empty(folder)
    return states_vision(config) and config.get("model_type") in PROCESSORS


def local_model_folder(name: str, settings: Settings) -> Path | None:
    """Where a model's files are on this machine: a folder, or a .gguf file that the user named. None where they are
    not here; a packaged model is known by its name in the models folder."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        stored = find_stored_model(name, settings.models_dir)
        if stored is None and hub.is_hub_id(hub_id := full_model_name(name)):
            return hub.cached_hub_folder(hub_id)
        stored = stored or find_stored_model_by_prefix(name, settings.models_dir)
    except ModelError:  # several have that name, which loading reports
        return None
    return None if stored is None else stored.path


def config_or_empty(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
