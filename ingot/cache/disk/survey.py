"""Listing, verifying and trimming a folder of records, for the command line."""

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
    """Records of one scope; `about` has what they depend on."""

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
    other_bytes: int  # of files that are not records
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
        """Each record that is damaged. Reads all of them, and changes nothing."""
        for scope in self.scopes:
            for file in scope.files:
                try:
                    read_record(self.files, file.path)
                except (DamagedRecord, OSError) as problem:
                    yield file.path, str(problem)


def trim_folder(folder: Path, most: int, files: FileSystem | None = None) -> int:
    """Remove damaged files, then the least recently used records, until the folder has at most `most` bytes, except for
    what the index itself takes; returns the bytes that this freed. Servers that use it may go on. Raises OSError."""
    files = files or FileSystem()
    with files.alone(folder / LOCK_FILE, PATIENCE_S):
        found = FolderSurvey.of(folder, files)
        before = left = found.nbytes
        index = ResilientIndex(folder / INDEX_FILE, files)
        used: dict[str, float] = {}
        for scope in found.scopes:
            used |= index.read(lambda index: index.used(scope.scope), dict)  # noqa: B023  (run at once)
        records = [file for scope in found.scopes for file in scope.files]
        records.sort(key=lambda file: max(file.changed, used.get(file.path.name, 0.0)))
        gone: dict[str, list[str]] = {}
        for file in [*found.damaged, *records]:
            if left <= most and file not in found.damaged:
                break
            files.remove(file.path)
            gone.setdefault(file.path.parent.name, []).append(file.path.name)
            left -= file.nbytes
        for name, names in gone.items():
            index.write(lambda index: index.remove(name, names))  # noqa: B023  (run at once)
        index.close()
    return before - left


def _read_about(home: Path) -> dict[str, str]:
    try:
        about = json.loads((home / ABOUT_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in about.items()} if isinstance(about, dict) else {}
