"""A record's file: its header, reading and verifying it, and the file system calls of the disk tier.

It is a safetensors file. Its header has the checksum of every tensor, a checksum of its own, and the MAC of that under
the server's secret, so that nobody else can make a file that is accepted. Verifying that files are intact does not need
the secret. A header says all that the KV depends on (`key`), its owner and its tokens. So a file can be indexed from
its header alone, and a foreign one is recognised.

`FileSystem` has the system calls, each of which a test can make fail. Folders and files are accessible to this user
only. Failures raise OSError. Pure Python.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import re
import shlex
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

from blake3 import blake3

from ingot.cache.archive import (
    SEAL_DIGITS,
    SEALED_HEADER,
    StoredRecord,
    header_manifest,
    hex_mac,
    record_as_json,
    record_fields_from_json,
    safetensors_header,
    with_seal,
)

RECORD_FORMAT: Final = "ingot record, version 3"
LONGEST_RECORD_HEADER: Final = 1 << 26
"""Bytes."""
LENGTH_BYTES: Final = 8
"""Bytes at a file's beginning that say how long its header is."""
_SUM_DIGITS: Final = 32
UNSUMMED: Final = "0" * _SUM_DIGITS
PathHash = blake2b
_WITHOUT_MAC: Final = re.compile(rb'\{"__metadata__": \{"checksum": "[0-9a-f]{64}", "ingot": "')


class DamagedRecord(Exception):
    """A file that is not as it was written, or not a record at all."""


def hex_digest(*parts: str | Iterable[int]) -> str:
    """Of texts and tokens, in order."""
    whole = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else array("q", part).tobytes()
        whole.update(len(raw).to_bytes(8, "little") + raw)
    return whole.hexdigest()


def new_path_hash() -> PathHash:
    """The hash of no tokens. That of a longer path extends a copy of a shorter one's, so no token is hashed twice."""
    return blake2b(digest_size=16, person=b"ingot path")


def extend_path_hash(hashed: PathHash, tokens: Iterable[int]) -> PathHash:
    longer = hashed.copy()
    longer.update(array("q", tokens).tobytes())
    return longer


def scope_digest(key: Mapping[str, str]) -> str:
    """Identifies all that the KV depends on: it is useless to a server with another one."""
    return hex_digest(RECORD_FORMAT, *(part for name in sorted(key) for part in (name, key[name])))


def sealed_scope_digest(key: Mapping[str, str], secret: bytes) -> str:
    """The same with the server's secret: servers with different secrets leave each other's files alone."""
    return hex_digest("sealed", scope_digest(key), hex_mac(secret, "scope"))


def tenant_digest(tenant: str) -> str:
    return hex_digest("tenant", tenant)


@dataclass(frozen=True, slots=True)
class RecordOwner:
    """Whose a record is, as digests that reveal neither tenant nor salt."""

    tenant: str
    salt: str  # with the adapter that the KV was computed with, if there was one

    @classmethod
    def of(cls, tenant: str, salt: str, lora: str = "") -> RecordOwner:
        return cls(tenant_digest(tenant), hex_digest("salt", tenant, salt, *(("lora", lora) if lora else ())))


@dataclass(frozen=True, slots=True)
class RecordHeader:
    key: Mapping[str, str]
    owner: RecordOwner
    before: str  # the digest of all tokens up to its beginning: the `path` of the record that it continues,
    path: str  # and of those up to its end
    within: str  # the identity of a record from within whose tokens it continues, if it does
    oldest: tuple[int, ...]  # by group of layers, the first token that it has keys and values of
    record: StoredRecord
    sums: tuple[str, ...] = ()  # of each tensor's bytes
    variant: str = ""  # the end of its name, where the leader of a group of ranks determines it

    @property
    def identity(self) -> str:
        """The same for all records of the same tokens."""
        return record_identity(self.key, self.owner, self.path, self.record.begin)

    @property
    def name(self) -> str:
        """Of its file. A record of the same tokens with other parts, such as a checkpoint, has another name."""
        parts = json.dumps([self.record.deltas, self.record.checkpoint])
        return record_file_name(self.identity, self.variant or hex_digest(parts)[:8])

    @property
    def nbytes(self) -> int:
        """Of the file, also before the tensors' checksums are computed."""
        summed = self if self.sums else replace(self, sums=(UNSUMMED,) * len(self.record.tensors))
        return len(summed.encoded(b"")) + self.record.nbytes

    def encoded(self, secret: bytes) -> bytes:
        """How the file begins."""
        manifest = {
            "format": RECORD_FORMAT,
            "key": dict(self.key),
            "tenant": self.owner.tenant,
            "salt": self.owner.salt,
            "before": self.before,
            "path": self.path,
            "within": self.within,
            "oldest": self.oldest,
            "record": record_as_json(self.record),
            "sums": self.sums,
            **({"variant": self.variant} if self.variant else {}),
        }
        raw = safetensors_header(manifest, {str(index): tensor for index, tensor in enumerate(self.record.tensors)})
        checksum = _checksum(raw)
        return len(raw).to_bytes(LENGTH_BYTES, "little") + with_seal(raw, checksum, hex_mac(secret, checksum))


def record_identity(key: Mapping[str, str], owner: RecordOwner, path: str, begin: int) -> str:
    return hex_digest(scope_digest(key), owner.tenant, owner.salt, path, [begin])


def record_file_name(identity: str, variant: str) -> str:
    return f"{identity}-{variant}.safetensors"


def file_variant(name: str) -> str:
    return name.removesuffix(".safetensors").rpartition("-")[2]


def tensor_checksums(data: Sequence[bytes | memoryview]) -> tuple[str, ...]:
    """All of the same length, so that the file's length is known beforehand. BLAKE3 takes a seventh of BLAKE2's time,
    and other threads run meanwhile."""
    return tuple(blake3(raw).hexdigest(length=_SUM_DIGITS // 2) for raw in data)


def header_length(beginning: bytes) -> int:
    """Read from a file's first bytes. Raises DamagedRecord."""
    length = int.from_bytes(beginning, "little")
    if len(beginning) != LENGTH_BYTES or not 0 < length <= LONGEST_RECORD_HEADER:
        raise DamagedRecord("it has no header")
    return length


def decode_header(raw: bytes, secret: bytes | None = None) -> RecordHeader:
    """A header without its length. Verifies the MAC if a secret is passed. Raises DamagedRecord."""
    found = SEALED_HEADER.match(raw)
    if found is None and _WITHOUT_MAC.match(raw):
        raise DamagedRecord("it has no MAC, as written by an earlier version")
    if found is None:
        raise DamagedRecord("its header is not that of a record")
    checksum, mac = found[1].decode(), found[2].decode()
    if _checksum(with_seal(raw)) != checksum:
        raise DamagedRecord("its header has another checksum")
    if secret is not None and not hmac.compare_digest(mac, hex_mac(secret, checksum)):
        raise DamagedRecord("its MAC was made with another key than this server's")
    try:
        return _parse_manifest(header_manifest(raw))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise DamagedRecord("its header is invalid") from None


def _parse_manifest(manifest: dict[str, Any]) -> RecordHeader:
    record = StoredRecord(**record_fields_from_json(manifest["record"]))
    sums = tuple(str(each) for each in manifest["sums"])
    if manifest["format"] != RECORD_FORMAT or not record.whole or len(sums) != len(record.tensors):
        raise ValueError("incomplete")
    return RecordHeader(
        {str(name): str(value) for name, value in manifest["key"].items()},
        RecordOwner(str(manifest["tenant"]), str(manifest["salt"])),
        str(manifest["before"]),
        str(manifest["path"]),
        str(manifest["within"]),
        tuple(int(first) for first in manifest["oldest"]),
        record,
        sums,
        str(manifest.get("variant", "")),
    )


def _checksum(unsealed: bytes) -> str:
    return blake2b(unsealed, digest_size=SEAL_DIGITS // 2).hexdigest()


RECORD_NAME: Final = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredData:
    header: RecordHeader
    tensors: tuple[memoryview, ...]


def read_header(files: FileSystem, path: Path, nbytes: int, secret: bytes | None) -> RecordHeader:
    """The header of a file of so many bytes; tensors are not read. Verifies the MAC if a secret is passed. Raises
    DamagedRecord or OSError."""
    length = header_length(bytes(files.read(path, LENGTH_BYTES)))
    header = decode_header(bytes(files.read(path, LENGTH_BYTES + length)[LENGTH_BYTES:]), secret)
    if header.name != path.name:
        raise DamagedRecord("it is another record")
    if LENGTH_BYTES + length + header.record.nbytes != nbytes:
        raise DamagedRecord("it is not as long as its header says")
    return header


def read_record(files: FileSystem, path: Path, secret: bytes | None = None) -> StoredData:
    """All of a file, verified; the MAC too if a secret is passed. Raises DamagedRecord or OSError."""
    raw = files.read(path)
    begin = LENGTH_BYTES + header_length(bytes(raw[:LENGTH_BYTES]))
    header = decode_header(bytes(raw[LENGTH_BYTES:begin]), secret)
    if header.name != path.name:
        raise DamagedRecord("it is another record")
    tensors, at = [], begin
    for tensor in header.record.tensors:
        tensors.append(raw[at : at + tensor.nbytes])
        at += tensor.nbytes
    if raw.nbytes != at:
        raise DamagedRecord("it is not as long as its header says")
    if tensor_checksums(tensors) != header.sums:
        raise DamagedRecord("a tensor has another checksum")
    return StoredData(header, tuple(tensors))


try:
    import fcntl
except ImportError:  # without it, a folder serves one process
    fcntl = None  # type: ignore[assignment]

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
OTHERS_WRITE: Final = 0o022
LOCK_RETRY_S: Final = 0.005
"""How often a lock that another process holds is tried."""


class ListedFile(NamedTuple):
    path: Path
    nbytes: int
    changed: float  # unix time


class FileSystem:
    def make_folder(self, path: Path) -> None:
        """With its parents, unless it exists."""
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)

    def check_private(self, folder: Path, names: Iterable[str]) -> None:
        """Raises PermissionError, which says what to do, where other users can write to this folder or one of these
        names is a symbolic link there."""
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is another user's folder: name one of this user's own", str(folder))
        if found.st_mode & OTHERS_WRITE:
            advice = f"run chmod go-w {shlex.quote(str(folder))}, or name a folder within it, which will be created"
            raise PermissionError(errno.EPERM, f"other users may write to it: {advice}", str(folder))
        for link in (folder / name for name in names):
            if link.is_symlink():
                raise PermissionError(errno.ELOOP, f"{link} is a link, which ingot did not make: remove it", str(link))

    def within(self, folder: Path) -> tuple[list[Path], list[ListedFile]]:
        """The folders and the plain files in a folder. What vanishes meanwhile is left out."""
        folders: list[Path] = []
        files: list[ListedFile] = []
        for entry in os.scandir(folder):
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    files.append(ListedFile(Path(entry.path), stat.st_size, stat.st_mtime))
            except FileNotFoundError:
                continue
        return folders, files

    def listed(self, folder: Path) -> list[ListedFile]:
        """The plain files in a folder, recursively."""
        folders, found = self.within(folder)
        for each in folders:
            with suppress(FileNotFoundError):
                found += self.listed(each)
        return found

    def changed(self, folder: Path) -> int:
        """Differs from before when a file in the folder was added, removed or renamed."""
        return folder.stat().st_mtime_ns

    def free(self, folder: Path) -> int:
        """Bytes that this user may still write there."""
        stat = os.statvfs(folder)
        return stat.f_bavail * stat.f_frsize

    def write(self, path: Path, pieces: Iterable[bytes | memoryview], *, sync: bool) -> None:
        """A new file, complete when this returns; with `sync` also after a power loss."""
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
        """Writes some of it, and returns how many bytes."""
        return os.write(descriptor, raw)

    def sync(self, descriptor: int) -> None:
        if hasattr(fcntl, "F_FULLFSYNC"):  # where fsync does not flush the drive's own cache
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
        """A file, or its first `most` bytes."""
        with path.open("rb", buffering=0) as file:
            whole = memoryview(bytearray(os.fstat(file.fileno()).st_size if most is None else most))
            rest = whole
            while rest.nbytes and (count := self.get(file.fileno(), rest)):
                rest = rest[count:]
        return whole[: whole.nbytes - rest.nbytes]

    def get(self, descriptor: int, into: memoryview) -> int:
        """Reads some, and returns how many bytes; 0 at the end."""
        return os.readv(descriptor, [into])

    def rename(self, path: Path, to: Path) -> None:
        path.replace(to)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    @contextmanager
    def alone(self, path: Path, patience_s: float) -> Iterator[None]:
        """Hold this lock file exclusively, among all threads and processes. A process that dies releases it.

        Raises TimeoutError where another one does not release it in time."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0), FILE_MODE)
        try:
            if fcntl is not None:
                _wait_for_lock(descriptor, time.monotonic() + patience_s)
            yield
        finally:
            os.close(descriptor)


def _wait_for_lock(descriptor: int, until: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the folder") from None
            time.sleep(LOCK_RETRY_S)
