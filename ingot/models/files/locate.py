"""From what the user calls a model to a folder that can be loaded.

A name is, in this order: a packaged model, a path (folder or .gguf file), a model on the shelf, a hub id, one with
a kind of GGUF file (org/name:Q4_K_M), the beginning of a name on the shelf that no other begins with.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config import Settings
from ingot.errors import ModelError, nearest
from ingot.models.files import hub, packaged
from ingot.models.files.folder_checks import check_folder
from ingot.models.files.gguf_files import references_in
from ingot.models.files.model_store import HASH_LETTERS, ShelvedModel, begun, inventory, keep, named
from ingot.models.files.progress import Progress
from ingot.models.gguf.part_names import part_name, parts_of

EDGE = 1 << 20  # how much of a file's beginning and end goes into its fingerprint


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with config.json, safetensors weights and a tokenizer."""

    path: Path
    name: str  # the short name that it is served under
    source: str  # where it came from, without paths of this machine


def locate(name: str, settings: Settings, progress: Progress, *, in_place: bool = False) -> ModelFolder:
    """Finds the model, fetching or converting it where needed. Raises ModelError that says what to do.

    `in_place`: weights may stay in a GGUF file that they are in, where this machine uses them as they are there.
    """
    in_place = in_place and settings.ranks == 1
    model = packaged.find(name)
    if model is not None:
        path = packaged.ensure(model.name, settings, progress)
        return ModelFolder(path, model.name, model.origin["source"])
    path = Path(name).expanduser()
    if path.exists():
        return _local(path, settings, progress, in_place)
    if _means_path(name):
        raise ModelError(f"there is no file or folder {name!r}")
    if kept := named(name, settings.models_dir):
        return _shelved(kept, settings, progress, in_place)
    if wanted := hub.gguf_id(name):
        path = hub.fetch_gguf(*wanted, settings, progress)
        return ModelFolder(_converted(path, settings, progress, in_place), _stem(path), f"hub:{name}")
    if hub.is_hub_id(name):
        path = _checked(hub.fetch(name, settings, progress), name)
        return ModelFolder(path, name.partition("/")[2], f"hub:{name}")
    if kept := begun(name, settings.models_dir):
        return _shelved(kept, settings, progress, in_place)
    raise ModelError(_unknown(name, settings))


def _local(path: Path, settings: Settings, progress: Progress, in_place: bool) -> ModelFolder:
    path = path.absolute()
    if path.is_dir():
        folder = _whole(_checked(path, path.name), settings, progress, in_place)
        return ModelFolder(folder, path.resolve().name, f"folder:{path.resolve().name}")
    if path.suffix.lower() == ".gguf" and path.is_file():
        return ModelFolder(_converted(path, settings, progress, in_place), _stem(path), f"gguf:{path.name}")
    raise ModelError(f"{path.name} is neither a model folder nor a .gguf file")


def _shelved(kept: ShelvedModel, settings: Settings, progress: Progress, in_place: bool) -> ModelFolder:
    return ModelFolder(_whole(kept.path, settings, progress, in_place), kept.name, kept.source)


def _whole(folder: Path, settings: Settings, progress: Progress, in_place: bool) -> Path:
    """`folder`, or where weights that are in a GGUF file cannot stay there, the one that this is converted to."""
    elsewhere = references_in(folder)
    if elsewhere is None:
        return folder
    elsewhere.check()
    return folder if in_place else _converted(Path(elsewhere.files[0].path), settings, progress, in_place)


def _means_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.lower().endswith(".gguf")


def _checked(folder: Path, name: str) -> Path:
    """`folder`, if it is one that can be loaded."""
    ggufs = sorted(file.name for file in folder.glob("*.gguf"))
    hint = f"; it holds {ggufs[0]}, give that file instead" if ggufs else ""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} has no config.json, so it is no model folder{hint}")
    if not any(folder.glob("model*.safetensors")) and not any(folder.glob("kokoro*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        reason = " (pickled weights can run code and are not loaded)" if pickled else ""
        raise ModelError(f"{name} has no weights in model*.safetensors{reason}{hint}")
    check_folder(folder, name)
    return folder


def _converted(path: Path, settings: Settings, progress: Progress, in_place: bool) -> Path:
    """The folder that a .gguf file was converted to, on the shelf; converted now if it is not there.

    Where the native kernels use weights as they are in the file, only what else a model needs is converted. A copy of
    all of them that an earlier start made goes then.
    """
    from ingot.kernels import native
    from ingot.models.gguf.importer import convert_gguf

    parts = parts_of(path)
    origin = _fingerprint(parts)
    in_place = in_place and native.installed()
    if in_place:
        origin["in_place"] = [str(part.resolve()) for part in parts]
    stem = re.sub(r"[^\w.-]+", "-", _stem(path)).strip(".-") or "model"
    folder = settings.models_dir.expanduser() / f"{stem}-{origin['sha256'][:HASH_LETTERS]}"
    return keep(folder, origin, lambda target: convert_gguf(path, target, progress, in_place=in_place), progress)


def _stem(path: Path) -> str:
    """What a file is called, whichever part of a model it is."""
    said = part_name(path.name)
    return said.stem if said else path.stem


def _fingerprint(parts: list[Path]) -> dict[str, Any]:
    """Tells changed files apart without reading gigabytes: names, sizes, times, and both ends of each."""
    digest, newest = hashlib.sha256(), 0
    for path in parts:
        try:
            with path.open("rb") as stream:
                status = path.stat()
                digest.update(f"{path.name}\0{status.st_size}\0".encode())
                digest.update(stream.read(EDGE))
                stream.seek(max(0, status.st_size - EDGE))
                digest.update(stream.read(EDGE))
                newest = max(newest, status.st_mtime_ns)
        except OSError as error:
            raise ModelError(f"{path.name} cannot be read: {error.strerror or error}") from error
    return {"source": f"gguf:{parts[0].name}", "sha256": digest.hexdigest(), "mtime_ns": newest}


def _unknown(name: str, settings: Settings) -> str:
    shelf = [kept.name for kept in inventory(settings.models_dir)]
    known = list(dict.fromkeys([*packaged.names(), *shelf]))
    near = nearest(name.lower(), known)
    hint = f" Did you mean {near!r}?" if near else ""
    return (
        f"there is no model {name!r}.{hint} Known by name: {', '.join(known)}. Otherwise give a model folder, "
        "a .gguf file, or a hub id such as org/name."
    )
