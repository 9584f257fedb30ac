"""Compiled kernels in files: what was compiled once is not compiled again."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

USUAL = Path("~/.cache/ingot/kernels")
MOST_BYTES = 64 << 20
"""Of all files: some thousand kernels. Those that were not used for the longest time go first."""
_DIGEST = hashlib.sha256().digest_size


class CubinFolder:
    """Belongs to this user alone: what lies in it is executed. Any thread or process may read and write."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        """Raises OSError where it cannot be made, or others may write to it."""
        self.folder, self._most_bytes = private(folder.expanduser()), most_bytes

    def read(self, key: str) -> bytes | None:
        """None where there is none, or where it is damaged."""
        file = self._file(key)
        try:
            content = file.read_bytes()
            os.utime(file)
        except OSError:
            return None
        digest, cubin = content[:_DIGEST], content[_DIGEST:]
        return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None

    def write(self, key: str, cubin: bytes) -> None:
        """Raises OSError. Nobody sees half of a file."""
        put(self._file(key), hashlib.sha256(cubin).digest() + cubin)

    def prune(self) -> None:
        """Let go of what is too much; what another process let go of meanwhile is gone as well."""
        files = []
        for file in self.folder.iterdir():
            try:
                found = file.stat()
            except FileNotFoundError:
                continue
            files.append((found.st_mtime, found.st_size, file))
        left = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if left <= self._most_bytes:
                return
            file.unlink(missing_ok=True)
            left -= size

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.cubin"


def private(folder: Path) -> Path:
    """A folder whose files may be executed. Raises OSError where it cannot be made, or others may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone: remove it")
    return folder


def cubin_key(*parts: str) -> str:
    """Of everything that a cubin depends on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def put(file: Path, content: bytes) -> None:
    """Write a file of which nobody sees half. Raises OSError."""
    descriptor, aside = tempfile.mkstemp(dir=file.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as written:
            written.write(content)
        Path(aside).replace(file)
    except OSError:
        Path(aside).unlink(missing_ok=True)
        raise
