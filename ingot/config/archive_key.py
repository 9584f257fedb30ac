"""The secret that files of kept prompts are sealed with, those in `--cache-dir` and those that are exported: a file of
the server's own, made at its first use.

Whoever has it can make files that the server takes for its own, so nobody but the server's user may read it. Servers
that are to take each other's files are given the same one.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

from ingot.errors import Unavailable

log = logging.getLogger("ingot.cache")

SECRET_BYTES: Final = 32
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class ArchiveKey:
    """Its call reads a file: not for an event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def secret(self) -> bytes:
        """Raises Unavailable, and logs what to do, where there is none that can be relied on."""
        try:
            if not self._path.exists():
                self._make()
            return self._read()
        except OSError as error:
            log.error("the key that files of kept prompts are sealed with, %s: %s", self._path, error)
            raise Unavailable("The server cannot use its key for files of kept prompts; its log says why.") from error

    def _make(self) -> None:
        """Whole or not at all, and never in place of one that is there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".archive-key-")  # for this user's eyes alone
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(SECRET_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(name, self._path)
        except FileExistsError:  # another server of the same user was faster
            pass
        finally:
            Path(name).unlink()

    def _read(self) -> bytes:
        with self._path.open() as file:
            if os.fstat(file.fileno()).st_mode & OTHERS:
                raise OSError("other users may read it; run chmod 600 on it, or delete it to have a new one made")
            text = file.read(2 * SECRET_BYTES + 2).strip()
        if not re.fullmatch(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}", text):
            raise OSError(f"it does not hold {2 * SECRET_BYTES} hexadecimal digits; delete it to have a new one made")
        return bytes.fromhex(text)
