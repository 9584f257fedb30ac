"""The outermost edge: all that the disk tier asks of the file system, in calls that a test can let fail.

Folders are for this user alone, and so are files. What fails raises OSError.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

try:
    import fcntl
except ImportError:  # where there is none, a folder is for one process
    fcntl = None  # type: ignore[assignment]

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
OTHERS_WRITE: Final = 0o022
AGAIN_S: Final = 0.005
"""How often a folder is asked for that another process uses."""


class Listed(NamedTuple):
    path: Path
    nbytes: int
    changed: float  # unix time


class Files:
    def make_folder(self, path: Path) -> None:
        """With those above it, where there is none."""
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def check_private(self, folder: Path, names: Iterable[str]) -> None:
        """Raises PermissionError, which says what to do, where others could put files into this folder, or have put
        links in place of files of these names there."""
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is another user's folder: name one of this user's own", str(folder))
        if found.st_mode & OTHERS_WRITE:
            advice = f"run chmod go-w {shlex.quote(str(folder))}, or name a folder within it, which is made"
            raise PermissionError(errno.EPERM, f"other users may write to it: {advice}", str(folder))
        for link in (folder / name for name in names):
            if link.is_symlink():
                raise PermissionError(errno.ELOOP, f"{link} is a link, which ingot did not make: remove it", str(link))

    def within(self, folder: Path) -> tuple[list[Path], list[Listed]]:
        """The folders and the plain files in a folder, whosever they are. What vanishes meanwhile is left out."""
        folders: list[Path] = []
        files: list[Listed] = []
        for entry in os.scandir(folder):
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    files.append(Listed(Path(entry.path), stat.st_size, stat.st_mtime))
            except FileNotFoundError:
                continue
        return folders, files

    def listed(self, folder: Path) -> list[Listed]:
        """The plain files in a folder and in those below it."""
        folders, found = self.within(folder)
        for each in folders:
            with suppress(FileNotFoundError):
                found += self.listed(each)
        return found

    def changed(self, folder: Path) -> int:
        """Something else than before, when a file in a folder came, went or got another name."""
        return folder.stat().st_mtime_ns

    def free(self, folder: Path) -> int:
        """Bytes that this user may still write there."""
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize

    def write(self, path: Path, pieces: Iterable[bytes | memoryview], *, sync: bool) -> None:
        """A new file, whole when this returns; with `sync` also after a loss of power."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), FILE_MODE)
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest.nbytes:
                    written = self.put(descriptor, rest)
                    if written <= 0:
                        raise OSError(errno.EIO, "nothing was written", str(path))
                    rest = rest[written:]
            if sync:
                self.sync(descriptor)
        finally:
            os.close(descriptor)

    def put(self, descriptor: int, raw: memoryview) -> int:
        """Writes some of it; says how much."""
        return os.write(descriptor, raw)

    def sync(self, descriptor: int) -> None:
        if hasattr(fcntl, "F_FULLFSYNC"):  # where fsync leaves it to the drive when it writes
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: Path, most: int | None = None) -> memoryview:
        """A file, or how it begins."""
        with path.open("rb", buffering=0) as file:
            whole = memoryview(bytearray(os.fstat(file.fileno()).st_size if most is None else most))
            rest = whole
            while rest.nbytes and (count := self.get(file.fileno(), rest)):
                rest = rest[count:]
        return whole[: whole.nbytes - rest.nbytes]

    def get(self, descriptor: int, into: memoryview) -> int:
        """Reads some; says how much, 0 at the end."""
        return os.readv(descriptor, [into])

    def rename(self, path: Path, to: Path) -> None:
        path.replace(to)

    def remove(self, path: Path) -> None:
        """Nothing is wrong where it is gone already."""
        path.unlink(missing_ok=True)

    @contextmanager
    def alone(self, path: Path, patience_s: float) -> Iterator[None]:
        """As the only one, of all threads and processes, that holds this file. A process that dies lets go of it.

        Raises TimeoutError where another one does not in time."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0), FILE_MODE)
        try:
            if fcntl is not None:
                _wait_for(descriptor, time.monotonic() + patience_s)
            yield
        finally:
            os.close(descriptor)


def _wait_for(descriptor: int, until: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the folder") from None
            time.sleep(AGAIN_S)
