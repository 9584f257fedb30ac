"""Archives of cached prefixes, and the description of a stored record that archives and the disk tier share.

An archive is a safetensors file. Its header's metadata begins with a checksum of the header (with zeros for the
checksum and the MAC) and of all data; then the MAC of that checksum under the server's secret; then a manifest: format
version, key (all that the KV depends on), and the tree of records. A file that is incomplete, was sealed with another
secret or was made under another key is refused with an error that says so. Nothing in it is read before checksum and
MAC are verified. Pure Python: tensors are bytes here.
"""

from __future__ import annotations

import hmac
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from ingot.errors import BadRequest, Cancelled

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "I64": 8, "U8": 1}


@dataclass(frozen=True, slots=True)
class TensorShape:
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The tokens of one node of the index, and the tensors of its record.

    `deltas` has (begin, end, number of tensors) for each layer, None for recurrent ones; `checkpoint` has which parts
    of each layer's state are stored.
    """

    tokens: tuple[int, ...]
    begin: int
    landmark: bool
    deltas: tuple[tuple[int, int, int] | None, ...]
    checkpoint: tuple[tuple[bool, ...], ...] | None
    tensors: tuple[TensorShape, ...]

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def whole(self) -> bool:
        """Whether it has tokens, and as many tensors as it describes."""
        described = sum(delta[2] for delta in self.deltas if delta is not None)
        described += sum(sum(layer) for layer in self.checkpoint or ())
        return bool(self.tokens) and described == len(self.tensors)


def record_as_json(record: StoredRecord) -> dict[str, Any]:
    return {
        "tokens": record.tokens,
        "begin": record.begin,
        "landmark": record.landmark,
        "deltas": record.deltas,
        "checkpoint": record.checkpoint,
        "tensors": [[tensor.dtype, *tensor.shape] for tensor in record.tensors],
    }


def record_fields_from_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `record_as_json`. Raises TypeError, ValueError or KeyError where the fields are invalid."""
    checkpoint = fields["checkpoint"]
    return {
        "tokens": tuple(int(token) for token in fields["tokens"]),
        "begin": int(fields["begin"]),
        "landmark": bool(fields["landmark"]),
        "deltas": tuple(None if delta is None else _parse_delta(delta) for delta in fields["deltas"]),
        "checkpoint": None if checkpoint is None else tuple(tuple(map(bool, layer)) for layer in checkpoint),
        "tensors": tuple(_parse_tensor(tensor) for tensor in fields["tensors"]),
    }


def _parse_delta(fields: Sequence[Any]) -> tuple[int, int, int]:
    begin, end, count = map(int, fields)
    return begin, end, count


def _parse_tensor(fields: Sequence[Any]) -> TensorShape:
    dtype, *shape = fields
    if dtype not in DTYPE_BYTES or not all(isinstance(size, int) and 0 < size < 1 << 32 for size in shape):
        raise ValueError("no tensor")
    return TensorShape(dtype, tuple(shape))


SEAL_DIGITS = 64
NO_SEAL = "0" * SEAL_DIGITS
SEALED_HEADER = re.compile(rb'\{"__metadata__": \{"checksum": "([0-9a-f]{64})", "mac": "([0-9a-f]{64})", "ingot": "')
"""How a header begins that has a checksum and a MAC."""


def safetensors_header(manifest: Mapping[str, Any], tensors: Mapping[str, TensorShape]) -> bytes:
    """A header with zeros for its checksum and its MAC, of tensors that lie one behind another, without its length."""
    entries, at = {}, 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.nbytes]
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        at += tensor.nbytes
    metadata = {"checksum": NO_SEAL, "mac": NO_SEAL, "ingot": json.dumps(manifest)}
    raw = json.dumps({"__metadata__": metadata, **entries}).encode()
    return raw + b" " * (-len(raw) % 8)


def with_seal(header: bytes, checksum: str = NO_SEAL, mac: str = NO_SEAL) -> bytes:
    """The header with this checksum and MAC."""
    found = SEALED_HEADER.match(header)
    assert found is not None
    (checksum_at, checksum_end), (mac_at, mac_end) = found.span(1), found.span(2)
    parts = header[:checksum_at], checksum.encode(), header[checksum_end:mac_at], mac.encode(), header[mac_end:]
    return b"".join(parts)


def header_manifest(header: bytes) -> Any:
    """Raises KeyError, TypeError, ValueError or RecursionError where there is none."""
    return json.loads(json.loads(header)["__metadata__"]["ingot"])


def hex_mac(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), "sha256").hexdigest()


ARCHIVE_FORMAT = "ingot kept prefixes, version 2"
LONGEST_HEADER = 1 << 28
_CHUNK_BYTES = 1 << 20


class ArchiveError(BadRequest):
    """An archive that is foreign or damaged, or a file that is none."""

    code = "invalid_archive"


@dataclass(frozen=True, slots=True)
class ArchiveSeal:
    """What an archive is bound to: all that its KV depends on, and the secret of the server that made it."""

    key: Mapping[str, str]
    secret: bytes

    def mac(self, checksum: str) -> str:
        return hex_mac(self.secret, checksum)


def check_still_wanted(going: Callable[[], bool]) -> None:
    """Raises Cancelled where `going` says that the client has left."""
    if not going():
        raise Cancelled("The client is gone.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRecord(StoredRecord):
    """One node of the index. Its tokens continue where those of an earlier record end."""

    salt: str
    parent: int  # the number of an earlier record, or -1
    lora: str = ""  # the digest of the adapter that its KV was computed with

    @classmethod
    def of(cls, record: StoredRecord, *, salt: str, parent: int, lora: str = "") -> ArchivedRecord:
        own = {each.name: getattr(record, each.name) for each in fields(StoredRecord)}
        return cls(**own, salt=salt, parent=parent, lora=lora)


def write_archive(
    path: Path,
    seal: ArchiveSeal,
    pieces: Iterable[tuple[ArchivedRecord, Sequence[bytes]]],
    going: Callable[[], bool],
) -> list[ArchivedRecord]:
    """Write records, each with the bytes of its tensors in order, as they come; returns them. Raises Cancelled once
    `going` says no. The header comes first and describes all of them, so their data waits in a temporary file."""
    written: list[ArchivedRecord] = []
    with path.open("wb") as file, TemporaryFile(dir=path.parent) as waiting:
        for piece, data in pieces:
            written.append(piece)
            for raw, tensor in zip(data, piece.tensors, strict=True):
                assert len(raw) == tensor.nbytes
                waiting.write(raw)
        header = _encode_header(seal.key, written)
        digest = blake2b(header, digest_size=SEAL_DIGITS // 2)
        file.write(len(header).to_bytes(8, "little") + header)
        waiting.seek(0)
        while part := waiting.read(_CHUNK_BYTES):
            check_still_wanted(going)
            digest.update(part)
            file.write(part)
        file.seek(8)
        file.write(with_seal(header, digest.hexdigest(), seal.mac(digest.hexdigest())))
    return written


def _encode_header(key: Mapping[str, str], pieces: Sequence[ArchivedRecord]) -> bytes:
    records = [
        {"salt": piece.salt, "parent": piece.parent, "lora": piece.lora, **record_as_json(piece)} for piece in pieces
    ]
    tensors = {
        f"{number}.{index}": tensor for number, piece in enumerate(pieces) for index, tensor in enumerate(piece.tensors)
    }
    return safetensors_header({"format": ARCHIVE_FORMAT, "key": dict(key), "pieces": records}, tensors)


@dataclass(frozen=True, slots=True)
class Archive:
    """A file that was verified, and whose key is this server's."""

    path: Path
    pieces: tuple[ArchivedRecord, ...]
    offset: int  # where the data begins

    @classmethod
    def open(cls, path: Path, seal: ArchiveSeal, going: Callable[[], bool]) -> Archive:
        """Raises ArchiveError where something is wrong with the file, and Cancelled once `going` says no."""
        with path.open("rb") as file:
            header = _read_header(file)
            _check_seal(file, header, seal, going)
        manifest = _manifest(header)
        _check_key(manifest.get("key"), seal.key)
        try:
            pieces = tuple(_parse_piece(fields) for fields in manifest["pieces"])
        except (TypeError, ValueError, KeyError):
            raise _damaged_archive("its list of records is invalid") from None
        _check_tree(pieces)
        if sum(piece.nbytes for piece in pieces) != path.stat().st_size - 8 - len(header):
            raise _damaged_archive("its data does not have the length that its header states")
        return cls(path, pieces, 8 + len(header))

    def data(self) -> Iterable[list[bytes]]:
        """Each record's tensors, in order."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for piece in self.pieces:
                yield [file.read(tensor.nbytes) for tensor in piece.tensors]


def _damaged_archive(problem: str) -> ArchiveError:
    return ArchiveError(f"The file is damaged: {problem}.")


def _read_header(file: BinaryIO) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    header = file.read(length) if 0 < length <= LONGEST_HEADER else b""
    if not header or len(header) != length:
        raise ArchiveError("The file is not an archive of cached prefixes, or it is truncated.")
    return header


def _check_seal(file: BinaryIO, header: bytes, seal: ArchiveSeal, going: Callable[[], bool]) -> None:
    """`file` was read up to the header's end."""
    found = SEALED_HEADER.match(header)
    if found is None:
        raise _unknown_format()
    checksum, mac = found[1].decode(), found[2].decode()
    digest = blake2b(with_seal(header), digest_size=SEAL_DIGITS // 2)
    while part := file.read(_CHUNK_BYTES):
        check_still_wanted(going)
        digest.update(part)
    if digest.hexdigest() != checksum:
        raise _damaged_archive("its checksum does not match its contents")
    if not hmac.compare_digest(mac, seal.mac(checksum)):
        raise ArchiveError(
            "The file was sealed with another server's key. Servers that share a key (--archive-key-file) accept each "
            "other's files."
        )


def _unknown_format() -> ArchiveError:
    return ArchiveError(f"The file is not an archive of cached prefixes that this server can read ({ARCHIVE_FORMAT}).")


def _manifest(header: bytes) -> dict[str, Any]:
    try:
        manifest = header_manifest(header)
    except (KeyError, TypeError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != ARCHIVE_FORMAT:
        raise _unknown_format()
    return manifest


def _check_key(file_key: object, key: Mapping[str, str]) -> None:
    values = file_key if isinstance(file_key, dict) else {}
    differing = [name for name in key if values.get(name) != key[name]]
    if differing:
        raise ArchiveError(f"The file was made with another {' and another '.join(differing)} than this server's.")


def _parse_piece(fields: dict[str, Any]) -> ArchivedRecord:
    salt, lora = str(fields["salt"]), str(fields.get("lora", ""))
    return ArchivedRecord(**record_fields_from_json(fields), salt=salt, parent=int(fields["parent"]), lora=lora)


def _check_tree(pieces: Sequence[ArchivedRecord]) -> None:
    for number, piece in enumerate(pieces):
        parent = pieces[piece.parent] if 0 <= piece.parent < number else None
        begins = 0 if piece.parent == -1 else parent.end if parent is not None else -1
        same = parent is None or (parent.salt, parent.lora) == (piece.salt, piece.lora)
        if piece.begin != begins or not same or not piece.whole:
            raise _damaged_archive(f"its record {number} does not fit the others")
