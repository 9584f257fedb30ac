"""The models folder: finished models stand on it whole, or not at all.

A model is built in a hidden folder beside its place, synced, and renamed into it. One process builds a model at a
time; whoever comes meanwhile waits and finds it done. What a killed process left behind is removed by the next
one that builds the same model.
"""

from __future__ import annotations

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
from typing import Any

from ingot.errors import ModelError
from ingot.models.files.progress import Progress

MANIFEST = "ingot.json"
HASH_LETTERS = 12  # of a file's fingerprint, in the name of the folder that it was converted to
CONVERTER = 2  # raise it when converting the same source gives another result: old conversions are then redone


@dataclass(frozen=True, slots=True)
class ShelvedModel:
    """A finished model on the shelf."""

    path: Path
    name: str  # the folder's, without the hash that tells files of the same name apart
    source: str
    size: int  # bytes


def keep(folder: Path, origin: Mapping[str, Any], build: Callable[[Path], None], progress: Progress) -> Path:
    """`folder`, holding what `build` makes of `origin`; built now if it is not there or was made of another origin.

    `origin` is compared as a whole: it says everything that the result depends on, and its "source" is shown to
    people. `build` fills an empty folder; that folder's parent is scratch space that vanishes afterwards.
    """
    if is_kept(folder, origin):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            if not is_kept(folder, origin):
                _sweep(folder)
                _build(folder, origin, build)
    except OSError as error:
        raise ModelError(f"cannot prepare {folder.name} in the models folder: {error.strerror or error}") from error
    return folder


def is_kept(folder: Path, origin: Mapping[str, Any]) -> bool:
    """Whether the finished model is there. Looks at the manifest and at file sizes, so it takes milliseconds."""
    manifest = _manifest(folder)
    if manifest is None or manifest["origin"] != {**origin, "converter": CONVERTER}:
        return False
    return all(_size(folder / name) == size for name, size in manifest["files"].items())


def source_of(folder: Path) -> str | None:
    """What a finished model was made of; None for a folder that is none of ours."""
    manifest = _manifest(folder)
    return None if manifest is None else str(manifest["origin"]["source"])


def inventory(models_dir: Path) -> list[ShelvedModel]:
    """The finished models on the shelf, by name."""
    found = []
    for folder in sorted(models_dir.expanduser().glob("*/")):
        manifest = _manifest(folder)
        if manifest is not None:
            origin = manifest["origin"]
            name = folder.name.removesuffix(f"-{str(origin.get('sha256'))[:HASH_LETTERS]}")
            found.append(ShelvedModel(folder, name, origin["source"], sum(manifest["files"].values())))
    return found


def named(name: str, models_dir: Path) -> ShelvedModel | None:
    """The model on the shelf that is called `name`, with or without its hash.

    Raises ModelError where several are.
    """
    shelf = inventory(models_dir)
    for kept in shelf:
        if kept.path.name == name:
            return kept
    return _only(name, [kept for kept in shelf if kept.name.lower() == name.lower()])


def begun(name: str, models_dir: Path) -> ShelvedModel | None:
    """The one model on the shelf whose name begins like this. Raises ModelError where several do."""
    return _only(name, [kept for kept in inventory(models_dir) if kept.path.name.lower().startswith(name.lower())])


def remove(kept: ShelvedModel, progress: Progress) -> None:
    """Takes a model off the shelf, at once for whoever looks for it; waits for a process that is building it."""
    try:
        with _locked(kept.path, progress):
            hidden = Path(tempfile.mkdtemp(prefix=f".{kept.path.name}.", suffix=".part", dir=kept.path.parent))
            kept.path.rename(hidden / "removed")
            shutil.rmtree(hidden)
    except OSError as error:
        raise ModelError(f"{kept.path.name} cannot be removed: {error.strerror or error}") from error


def _only(name: str, found: list[ShelvedModel]) -> ShelvedModel | None:
    if len(found) > 1:
        several = ", ".join(f"{kept.path.name} ({kept.source})" for kept in found)
        raise ModelError(f"several models here are called {name!r}; say which: {several}")
    return found[0] if found else None


def _manifest(folder: Path) -> dict[str, Any] | None:
    """What the manifest says, or None where there is none that can be understood."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sound = isinstance(manifest["origin"]["source"], str) and all(
            isinstance(size, int) for size in manifest["files"].values()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return manifest if sound else None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {folder.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(folder: Path) -> None:
    """Removes what killed builds left; none is running, as the lock is ours."""
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


def _build(folder: Path, origin: Mapping[str, Any], build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        made = scratch / "model"
        made.mkdir()
        build(made)
        _write_manifest(made, origin)
        _sync(made)
        if folder.exists():
            folder.rename(scratch / "outdated")
        made.rename(folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_manifest(made: Path, origin: Mapping[str, Any]) -> None:
    files = {str(path.relative_to(made)): path.stat().st_size for path in sorted(made.rglob("*")) if path.is_file()}
    manifest = {"origin": {**origin, "converter": CONVERTER}, "files": files}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _sync(made: Path) -> None:
    for path in sorted(made.rglob("*"), reverse=True):
        if path.is_dir():
            _sync_folder(path)
        else:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    _sync_folder(made)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
