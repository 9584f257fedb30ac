"""The model store: a folder of finished models, each of them there whole or not at all.

A model is built in a hidden folder next to its own, synced, and renamed. One process builds a model at a time; others
wait and find it done. What a killed process left behind is removed by the next one that builds the same model.
`is_disk_full` recognises a full disk in errors of any library. Imports nothing heavy.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingot.errors import ModelError
from ingot.models.files.progress import Progress

MANIFEST = "ingot.json"
HASH_LETTERS = 12  # of a file's fingerprint, in the name of the folder that it was converted to
DISK_FULL_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_WORDS: Final = tuple(os.strerror(number) for number in DISK_FULL_ERRORS)
CONVERTER_VERSION = 2  # raise it when converting the same source gives another result: old conversions are then redone


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A finished model in the model store."""

    path: Path
    name: str  # the folder's, without the hash that distinguishes files of the same name
    source: str
    size: int  # bytes


def store_model(folder: Path, origin: Mapping[str, Any], build: Callable[[Path], None], progress: Progress) -> Path:
    """`folder`, as `build` makes it from `origin`; built now if it is not there or was built from another origin.

    `origin` is compared as a whole: it has everything that the result depends on, and its "source" is shown to people.
    `build` fills an empty folder; that folder's parent is scratch space that is removed afterwards.
    """
    if is_stored(folder, origin):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock_folder(folder, progress):
            if not is_stored(folder, origin):
                _remove_leftovers(folder)
                _build_model(folder, origin, build)
    except OSError as error:
        raise ModelError(f"cannot prepare {folder.name} in the models folder: {error.strerror or error}") from error
    return folder


def is_stored(folder: Path, origin: Mapping[str, Any]) -> bool:
    """Whether the finished model is there. Checks the manifest and file sizes, so it takes milliseconds."""
    manifest = _read_manifest(folder)
    if manifest is None or manifest["origin"] != {**origin, "converter": CONVERTER_VERSION}:
        return False
    return all(_file_size(folder / name) == size for name, size in manifest["files"].items())


def stored_model_source(folder: Path) -> str | None:
    """The source of a finished model; None for a folder that is none of ours."""
    manifest = _read_manifest(folder)
    return None if manifest is None else str(manifest["origin"]["source"])


def list_stored_models(models_dir: Path) -> list[StoredModel]:
    """The finished models in the store, by name."""
    found = []
    for folder in sorted(models_dir.expanduser().glob("*/")):
        manifest = _read_manifest(folder)
        if manifest is not None:
            origin = manifest["origin"]
            name = folder.name.removesuffix(f"-{str(origin.get('sha256'))[:HASH_LETTERS]}")
            found.append(StoredModel(folder, name, origin["source"], sum(manifest["files"].values())))
    return found


def find_stored_model(name: str, models_dir: Path) -> StoredModel | None:
    """The model in the store that is called `name`, with or without its hash. Raises ModelError where several are."""
    stored = list_stored_models(models_dir)
    exact = [model for model in stored if model.path.name == name]
    return exact[0] if exact else _only_match(name, [model for model in stored if model.name.lower() == name.lower()])


def find_stored_model_by_prefix(name: str, models_dir: Path) -> StoredModel | None:
    """The one model in the store whose name has this prefix. Raises ModelError where several have."""
    stored = list_stored_models(models_dir)
    return _only_match(name, [model for model in stored if model.path.name.lower().startswith(name.lower())])


def remove_stored_model(model: StoredModel, progress: Progress) -> None:
    """Removes a model from the store, atomically for readers; waits for a process that is building it."""
    folder = model.path
    try:
        with _lock_folder(folder, progress):
            hidden = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
            folder.rename(hidden / "removed")
            shutil.rmtree(hidden)
    except OSError as error:
        raise ModelError(f"{folder.name} cannot be removed: {error.strerror or error}") from error


def _only_match(name: str, found: list[StoredModel]) -> StoredModel | None:
    if len(found) > 1:
        several = ", ".join(f"{model.path.name} ({model.source})" for model in found)
        raise ModelError(f"several models here are called {name!r}; say which: {several}")
    return found[0] if found else None


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is no valid one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        is_valid = isinstance(manifest["origin"]["source"], str) and all(
            isinstance(size, int) for size in manifest["files"].values()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return manifest if is_valid else None


def _file_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


@contextmanager
def _lock_folder(folder: Path, progress: Progress) -> Iterator[None]:
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {folder.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Removes what killed builds left; none is running, as the lock is ours."""
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


def _build_model(folder: Path, origin: Mapping[str, Any], build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        model = scratch / "model"
        model.mkdir()
        build(model)
        _write_manifest(model, origin)
        _sync(model)
        if folder.exists():
            folder.rename(scratch / "outdated")
        model.rename(folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_manifest(folder: Path, origin: Mapping[str, Any]) -> None:
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = {"origin": {**origin, "converter": CONVERTER_VERSION}, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            _sync_folder(path)
        else:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def says_disk_full(text: str) -> bool:
    return any(words in text for words in DISK_FULL_WORDS)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind `error`, which libraries wrap in their own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if (isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS) or says_disk_full(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False
