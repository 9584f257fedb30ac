"""Records for tests of the disk tier that need no model: what is in one follows from its tokens."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from ingot.cache.archive import StoredRecord, TensorShape
from ingot.cache.disk.record_file import FileSystem, RecordHeader, RecordOwner, StoredData, hex_digest
from ingot.cache.disk.store import DiskLimits, RecordStore

KEY = {"model": "abc", "codec": "raw"}
SECRET = b"ours"
ME = RecordOwner.of("me", "")
LIMITS = DiskLimits(1 << 26, sync=False)
TOKEN = 1000
"""Bytes of a token in each of two tensors."""


def contents(path: str, begin: int, end: int, *, checkpoint: bool) -> list[bytes]:
    """Tensors that say whose they are: no two records have the same."""
    seed = blake2b(f"{path} {begin} {end}".encode(), digest_size=8).digest()
    rng = random.Random(seed)
    sizes = [TOKEN * (end - begin)] * 2 + [64] * checkpoint
    return [rng.randbytes(size) for size in sizes]


def record(
    tokens: Sequence[int],
    begin: int = 0,
    *,
    owner: RecordOwner = ME,
    key: dict[str, str] = KEY,
    checkpoint: bool = False,
) -> tuple[RecordHeader, list[bytes]]:
    """Of the tokens from `begin` on."""
    end, path = len(tokens), hex_digest(list(tokens))
    data = contents(path, begin, end, checkpoint=checkpoint)
    stored = StoredRecord(
        tuple(tokens[begin:]),
        begin,
        False,
        ((begin, end, 2), None),
        ((), (True,)) if checkpoint else None,
        tuple(TensorShape("U8", (len(raw),)) for raw in data),
    )
    return RecordHeader(key, owner, hex_digest(list(tokens[:begin])), path, "", (begin,), stored), data


def is_right(found: StoredData) -> bool:
    """Whether it holds, to the last bit, what was once written under its header."""
    header = found.header
    begin, end = header.record.begin, header.record.end
    right = contents(header.path, begin, end, checkpoint=header.record.checkpoint is not None)
    return [bytes(raw) for raw in found.tensors] == right


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def opened(
    folder: Path, limits: DiskLimits = LIMITS, files: FileSystem | None = None, secret: bytes = SECRET, **key: str
) -> RecordStore:
    its = KEY | key
    return RecordStore(folder, its, limits, secret, files, model=f"the model {its['model']}")


class FaultyFiles(FileSystem):
    """Fails where it is told to: `fault(call)` gives an error number, `"short"` or None."""

    def __init__(self, fault: Callable[[str], int | str | None] = lambda call: None) -> None:
        self.fault = fault
        self.room: int | None = None  # bytes that the drive still holds
        self.free_bytes: int | None = None

    def _meet(self, call: str) -> bool:
        found = self.fault(call)
        if isinstance(found, int):
            raise OSError(found, "injected")
        return found == "short"

    def put(self, descriptor: int, raw: memoryview) -> int:
        if self._meet("put"):
            raw = raw[: max(1, len(raw) // 3)]
        if self.room is not None:
            if self.room < 1:
                raise OSError(errno.ENOSPC, "injected")
            raw = raw[: self.room]
        count = super().put(descriptor, raw)
        if self.room is not None:
            self.room -= count
        return count

    def get(self, descriptor: int, into: memoryview) -> int:
        return super().get(descriptor, into[: max(1, len(into) // 3)] if self._meet("get") else into)

    def sync(self, descriptor: int) -> None:
        self._meet("sync")
        super().sync(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        self._meet("rename")
        super().rename(path, to)

    def remove(self, path: Path) -> None:
        self._meet("remove")
        super().remove(path)

    def free(self, folder: Path) -> int:
        return super().free(folder) if self.free_bytes is None else self.free_bytes
