"""Kept prefixes in a file: a safetensors file whose header says what they depend on, under a checksum and a seal.

The header's metadata begins with a checksum of the header, with zeros in the place of checksum and mac, and of all
data; then the mac of that checksum by a secret of the server's own; then a manifest (format version, key, the tree of
pieces). A file that is not whole, that was sealed with another secret or made under another key is refused by name;
nothing in it is read before checksum and mac are right. Pure Python: tensors are bytes here.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from ingot.cache.stored import StoredRecord, entries, fields_of, listed
from ingot.errors import BadRequest, Cancelled

FORMAT = "ingot kept prefixes, version 2"
DIGITS = 64
ZEROS = "0" * DIGITS
LONGEST_HEADER = 1 << 28
_READ = 1 << 20
_OPENING = re.compile(rb'\{"__metadata__": \{"checksum": "([0-9a-f]{64})", "mac": "([0-9a-f]{64})", "ingot": "')


class ArchiveError(BadRequest):
    """A file of kept prefixes that is foreign, damaged or not one at all."""

    code = "invalid_archive"


@dataclass(frozen=True, slots=True)
class ArchiveSeal:
    """What a file is bound to: all that the states in it depend on, and the secret of whoever may have made it."""

    key: Mapping[str, str]
    secret: bytes

    def mac(self, checksum: str) -> str:
        return hmac.new(self.secret, checksum.encode(), "sha256").hexdigest()


def check_going(going: Callable[[], bool]) -> None:
    """Raises Cancelled where `going` says that nobody waits for the work any more."""
    if not going():
        raise Cancelled("Nobody waits for the file any more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRecord(StoredRecord):
    """One node of the index: its tokens go on where an earlier piece's end."""

    salt: str
    parent: int  # the number of an earlier piece, or -1
    lora: str = ""  # the digest of the adapter that its states went through

    @classmethod
    def of(cls, record: StoredRecord, *, salt: str, parent: int, lora: str = "") -> ArchivedRecord:
        own = {each.name: getattr(record, each.name) for each in fields(StoredRecord)}
        return cls(**own, salt=salt, parent=parent, lora=lora)


def write(
    path: Path,
    seal: ArchiveSeal,
    pieces: Iterable[tuple[ArchivedRecord, Sequence[bytes]]],
    going: Callable[[], bool],
) -> list[ArchivedRecord]:
    """Write pieces, each with the bytes of its tensors in order, as they come; returns them. Raises Cancelled once
    `going` says no. The header comes first and names all of them: until they are known their data waits beside it."""
    known: list[ArchivedRecord] = []
    with path.open("wb") as file, TemporaryFile(dir=path.parent) as waiting:
        for piece, data in pieces:
            known.append(piece)
            for raw, tensor in zip(data, piece.tensors, strict=True):
                assert len(raw) == tensor.nbytes
                waiting.write(raw)
        header = _header(seal.key, known)
        digest = blake2b(header, digest_size=DIGITS // 2)
        file.write(len(header).to_bytes(8, "little") + header)
        waiting.seek(0)
        while part := waiting.read(_READ):
            check_going(going)
            digest.update(part)
            file.write(part)
        file.seek(8)
        file.write(_opened(header, digest.hexdigest(), seal.mac(digest.hexdigest())))
    return known


def _opened(header: bytes, checksum: str, mac: str) -> bytes:
    """The header with these in their places."""
    opening = _OPENING.match(header)
    assert opening is not None
    (checksum_at, checksum_end), (mac_at, mac_end) = opening.span(1), opening.span(2)
    parts = header[:checksum_at], checksum.encode(), header[checksum_end:mac_at], mac.encode(), header[mac_end:]
    return b"".join(parts)


def _header(key: Mapping[str, str], pieces: Sequence[ArchivedRecord]) -> bytes:
    manifest = {"format": FORMAT, "key": dict(key), "pieces": [_listed(piece) for piece in pieces]}
    metadata = {"checksum": ZEROS, "mac": ZEROS, "ingot": json.dumps(manifest)}
    names = [f"{number}.{place}" for number, piece in enumerate(pieces) for place in range(len(piece.tensors))]
    tensors = [tensor for piece in pieces for tensor in piece.tensors]
    raw = json.dumps({"__metadata__": metadata, **entries(names, tensors)}).encode()
    return raw + b" " * (-len(raw) % 8)


def _listed(piece: ArchivedRecord) -> dict[str, Any]:
    return {"salt": piece.salt, "parent": piece.parent, "lora": piece.lora, **listed(piece)}


@dataclass(frozen=True, slots=True)
class Archive:
    """A file that was found whole and fitting."""

    path: Path
    pieces: tuple[ArchivedRecord, ...]
    offset: int  # where the data begins

    @classmethod
    def open(cls, path: Path, seal: ArchiveSeal, going: Callable[[], bool]) -> Archive:
        """Raises ArchiveError that says what is wrong with the file, and Cancelled once `going` says no."""
        with path.open("rb") as file:
            header = _read_header(file)
            _check_seal(file, header, seal, going)
        manifest = _manifest(header)
        _check_key(manifest.get("key"), seal.key)
        try:
            pieces = tuple(_piece(stated) for stated in manifest["pieces"])
        except (TypeError, ValueError, KeyError):
            raise _damaged("its list of pieces makes no sense") from None
        _check_tree(pieces)
        if sum(piece.nbytes for piece in pieces) != path.stat().st_size - 8 - len(header):
            raise _damaged("its data is not as long as its header says")
        return cls(path, pieces, 8 + len(header))

    def data(self) -> Iterable[list[bytes]]:
        """Each piece's tensors, in order."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for piece in self.pieces:
                yield [file.read(tensor.nbytes) for tensor in piece.tensors]


def _damaged(how: str) -> ArchiveError:
    return ArchiveError(f"The file is damaged: {how}.")


def _read_header(file: BinaryIO) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    header = file.read(length) if 0 < length <= LONGEST_HEADER else b""
    if not header or len(header) != length:
        raise ArchiveError("The file is no archive of kept prefixes, or only the beginning of one.")
    return header


def _check_seal(file: BinaryIO, header: bytes, seal: ArchiveSeal, going: Callable[[], bool]) -> None:
    """Of a file that was read up to the header's end."""
    opening = _OPENING.match(header)
    if opening is None:
        raise ArchiveError(f"The file is no archive of kept prefixes that this server reads ({FORMAT}).")
    checksum, mac = opening[1].decode(), opening[2].decode()
    digest = blake2b(_opened(header, ZEROS, ZEROS), digest_size=DIGITS // 2)
    while piece := file.read(_READ):
        check_going(going)
        digest.update(piece)
    if digest.hexdigest() != checksum:
        raise _damaged("its checksum is not that of what is in it")
    if not hmac.compare_digest(mac, seal.mac(checksum)):
        raise ArchiveError(
            "The file was sealed with another server's key. Servers that share one (--archive-key-file) take each "
            "other's files."
        )


def _manifest(header: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(json.loads(header)["__metadata__"]["ingot"])
    except (KeyError, TypeError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ArchiveError(f"The file is no archive of kept prefixes that this server reads ({FORMAT}).")
    return manifest


def _check_key(stated: object, key: Mapping[str, str]) -> None:
    held = stated if isinstance(stated, dict) else {}
    differing = [name for name in key if held.get(name) != key[name]]
    if differing:
        raise ArchiveError(f"The file was made with another {' and another '.join(differing)} than this server's.")


def _piece(stated: dict[str, Any]) -> ArchivedRecord:
    salt, lora = str(stated["salt"]), str(stated.get("lora", ""))
    return ArchivedRecord(**fields_of(stated), salt=salt, parent=int(stated["parent"]), lora=lora)


def _check_tree(pieces: Sequence[ArchivedRecord]) -> None:
    for number, piece in enumerate(pieces):
        parent = pieces[piece.parent] if 0 <= piece.parent < number else None
        begins = 0 if piece.parent == -1 else parent.end if parent is not None else -1
        same = parent is None or (parent.salt, parent.lora) == (piece.salt, piece.lora)
        if piece.begin != begins or not same or not piece.whole:
            raise _damaged(f"its piece {number} does not fit the others")
