"""A folder of records as a person looks at it, whichever servers wrote there: listed, verified and trimmed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ingot.cache.disk.index import ResilientIndex
from ingot.cache.disk.record_file import RECORD_NAME, DamagedRecord, FileSystem, ListedFile, read_record
from ingot.cache.disk.store import ABOUT_FILE, DAMAGED_FOLDER, INDEX_FILE, LOCK_FILE, PATIENCE_S


@dataclass(frozen=True, slots=True)
class ScopeSurvey:
    """Records that depend on the same things, which `about` says in words."""

    scope: str
    about: dict[str, str]
    files: list[ListedFile]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True, slots=True)
class FolderSurvey:
    scopes: list[ScopeSurvey]
    damaged: list[ListedFile]
    other_bytes: int  # of files that are no records
    files: FileSystem = field(repr=False)

    @classmethod
    def of(cls, folder: Path, files: FileSystem | None = None) -> FolderSurvey:
        """Raises OSError where there is no such folder."""
        files = files or FileSystem()
        by_scope: dict[Path, list[ListedFile]] = {}
        damaged: list[ListedFile] = []
        other = 0
        for file in files.listed(folder):
            if file.path.parent == folder / DAMAGED_FOLDER:
                damaged.append(file)
            elif RECORD_NAME.fullmatch(file.path.name) and file.path.parent.parent == folder:
                by_scope.setdefault(file.path.parent, []).append(file)
            else:
                other += file.nbytes
        scopes = [ScopeSurvey(home.name, _read_about(home), found) for home, found in sorted(by_scope.items())]
        return cls(scopes, damaged, other, files)

    @property
    def nbytes(self) -> int:
        return sum(scope.nbytes for scope in self.scopes) + sum(file.nbytes for file in self.damaged) + self.other_bytes

    def problems(self) -> Iterator[tuple[Path, str]]:
        """Each record that is not what was written. Reads all of them; changes nothing."""
        for scope in self.scopes:
            for file in scope.files:
                try:
                    read_record(self.files, file.path)
                except (DamagedRecord, OSError) as problem:
                    yield file.path, str(problem)


def trim_folder(folder: Path, most: int, files: FileSystem | None = None) -> int:
    """Remove damaged files, then the records that were used longest ago, whosever they are, until the folder has no
    more than `most` bytes, but for what the index notes of it; returns the bytes that this freed. Servers that use it
    may go on. Raises OSError."""
    files = files or FileSystem()
    with files.alone(folder / LOCK_FILE, PATIENCE_S):
        found = FolderSurvey.of(folder, files)
        before = left = found.nbytes
        index = ResilientIndex(folder / INDEX_FILE, files)
        never: dict[str, float] = {}
        used = {
            name: at
            for scope in found.scopes
            for name, at in index.using(lambda index: index.used(scope.scope), never).items()  # noqa: B023  (run at once)
        }
        records = [file for scope in found.scopes for file in scope.files]
        records.sort(key=lambda file: max(file.changed, used.get(file.path.name, 0.0)))
        gone: dict[str, list[str]] = {}
        for file in [*found.damaged, *records]:
            if left <= most and file not in found.damaged:
                break
            files.remove(file.path)
            gone.setdefault(file.path.parent.name, []).append(file.path.name)
            left -= file.nbytes
        for scope, names in gone.items():
            index.using(lambda index: index.remove(scope, names), None)  # noqa: B023  (run at once)
        index.close()
    return before - left


def _read_about(home: Path) -> dict[str, str]:
    try:
        stated = json.loads((home / ABOUT_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in stated.items()} if isinstance(stated, dict) else {}
