"""Cached prefixes in a file, and what is written of a record wherever it goes: which tokens, which tensors, in what
order.

An archive is a safetensors file whose header says what the prefixes depend on, under a checksum and a seal. The
header's metadata begins with a checksum of the header, with zeros in the place of checksum and mac, and of all data;
then the mac of that checksum by a secret of the server's own; then a manifest (format version, key, the tree of
pieces). A file that is not whole, that was sealed with another secret or made under another key is refused by name;
nothing in it is read before checksum and mac are right. Pure Python: tensors are bytes here.
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
    """The tokens of one node of the index, and what its record holds, in order.

    `deltas` has (begin, end, number of tensors) of each layer, None for recurrent ones; `checkpoint` says which parts
    of each layer's state there are.
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
        """Whether there are as many tensors as it speaks of, and some tokens."""
        held = sum(delta[2] for delta in self.deltas if delta is not None)
        held += sum(sum(layer) for layer in self.checkpoint or ())
        return bool(self.tokens) and held == len(self.tensors)


def record_as_json(record: StoredRecord) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "tokens": record.tokens,
        "begin": record.begin,
        "landmark": record.landmark,
        "deltas": record.deltas,
        "checkpoint": record.checkpoint,
        "tensors": [[tensor.dtype, *tensor.shape] for tensor in record.tensors],
    }


def record_fields_from_json(stated: Mapping[str, Any]) -> dict[str, Any]:
    """A record's fields, from what `record_as_json` made. Raises TypeError, ValueError or KeyError where it makes no
    sense."""
    checkpoint = stated["checkpoint"]
    return {
        "tokens": tuple(int(token) for token in stated["tokens"]),
        "begin": int(stated["begin"]),
        "landmark": bool(stated["landmark"]),
        "deltas": tuple(None if delta is None else _parse_delta(delta) for delta in stated["deltas"]),
        "checkpoint": None
        if checkpoint is None
        else tuple(tuple(bool(part) for part in layer) for layer in checkpoint),
        "tensors": tuple(_parse_tensor(tensor) for tensor in stated["tensors"]),
    }


def safetensors_entries(names: Sequence[str], tensors: Sequence[TensorShape]) -> dict[str, Any]:
    """Tensors that lie one behind another, as a safetensors header states them."""
    stated, at = {}, 0
    for name, tensor in zip(names, tensors, strict=True):
        offsets = [at, at + tensor.nbytes]
        stated[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        at += tensor.nbytes
    return stated


def _parse_delta(stated: Sequence[Any]) -> tuple[int, int, int]:
    begin, end, count = (int(number) for number in stated)
    return begin, end, count


def _parse_tensor(stated: Sequence[Any]) -> TensorShape:
    dtype, *shape = stated
    if dtype not in DTYPE_BYTES or not all(isinstance(size, int) and 0 < size < 1 << 32 for size in shape):
        raise ValueError("no tensor")
    return TensorShape(dtype, tuple(shape))


ARCHIVE_FORMAT = "ingot kept prefixes, version 2"
DIGITS = 64
ZEROS = "0" * DIGITS
LONGEST_HEADER = 1 << 28
_CHUNK_BYTES = 1 << 20
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


def check_still_wanted(going: Callable[[], bool]) -> None:
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


def write_archive(
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
        header = _encode_header(seal.key, known)
        digest = blake2b(header, digest_size=DIGITS // 2)
        file.write(len(header).to_bytes(8, "little") + header)
        waiting.seek(0)
        while part := waiting.read(_CHUNK_BYTES):
            check_still_wanted(going)
            digest.update(part)
            file.write(part)
        file.seek(8)
        file.write(_with_seal(header, digest.hexdigest(), seal.mac(digest.hexdigest())))
    return known


def _with_seal(header: bytes, checksum: str, mac: str) -> bytes:
    """The header with these in their places."""
    opening = _OPENING.match(header)
    assert opening is not None
    (checksum_at, checksum_end), (mac_at, mac_end) = opening.span(1), opening.span(2)
    parts = header[:checksum_at], checksum.encode(), header[checksum_end:mac_at], mac.encode(), header[mac_end:]
    return b"".join(parts)


def _encode_header(key: Mapping[str, str], pieces: Sequence[ArchivedRecord]) -> bytes:
    manifest = {"format": ARCHIVE_FORMAT, "key": dict(key), "pieces": [_piece_as_json(piece) for piece in pieces]}
    metadata = {"checksum": ZEROS, "mac": ZEROS, "ingot": json.dumps(manifest)}
    names = [f"{number}.{place}" for number, piece in enumerate(pieces) for place in range(len(piece.tensors))]
    tensors = [tensor for piece in pieces for tensor in piece.tensors]
    raw = json.dumps({"__metadata__": metadata, **safetensors_entries(names, tensors)}).encode()
    return raw + b" " * (-len(raw) % 8)


def _piece_as_json(piece: ArchivedRecord) -> dict[str, Any]:
    return {"salt": piece.salt, "parent": piece.parent, "lora": piece.lora, **record_as_json(piece)}


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
            pieces = tuple(_parse_piece(stated) for stated in manifest["pieces"])
        except (TypeError, ValueError, KeyError):
            raise _damaged_archive("its list of pieces makes no sense") from None
        _check_tree(pieces)
        if sum(piece.nbytes for piece in pieces) != path.stat().st_size - 8 - len(header):
            raise _damaged_archive("its data is not as long as its header says")
        return cls(path, pieces, 8 + len(header))

    def data(self) -> Iterable[list[bytes]]:
        """Each piece's tensors, in order."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for piece in self.pieces:
                yield [file.read(tensor.nbytes) for tensor in piece.tensors]


def _damaged_archive(how: str) -> ArchiveError:
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
        raise ArchiveError(f"The file is no archive of kept prefixes that this server reads ({ARCHIVE_FORMAT}).")
    checksum, mac = opening[1].decode(), opening[2].decode()
    digest = blake2b(_with_seal(header, ZEROS, ZEROS), digest_size=DIGITS // 2)
    while piece := file.read(_CHUNK_BYTES):
        check_still_wanted(going)
        digest.update(piece)
    if digest.hexdigest() != checksum:
        raise _damaged_archive("its checksum is not that of what is in it")
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
    if not isinstance(manifest, dict) or manifest.get("format") != ARCHIVE_FORMAT:
        raise ArchiveError(f"The file is no archive of kept prefixes that this server reads ({ARCHIVE_FORMAT}).")
    return manifest


def _check_key(stated: object, key: Mapping[str, str]) -> None:
    held = stated if isinstance(stated, dict) else {}
    differing = [name for name in key if held.get(name) != key[name]]
    if differing:
        raise ArchiveError(f"The file was made with another {' and another '.join(differing)} than this server's.")


def _parse_piece(stated: dict[str, Any]) -> ArchivedRecord:
    salt, lora = str(stated["salt"]), str(stated.get("lora", ""))
    return ArchivedRecord(**record_fields_from_json(stated), salt=salt, parent=int(stated["parent"]), lora=lora)


def _check_tree(pieces: Sequence[ArchivedRecord]) -> None:
    for number, piece in enumerate(pieces):
        parent = pieces[piece.parent] if 0 <= piece.parent < number else None
        begins = 0 if piece.parent == -1 else parent.end if parent is not None else -1
        same = parent is None or (parent.salt, parent.lora) == (piece.salt, piece.lora)
        if piece.begin != begins or not same or not piece.whole:
            raise _damaged_archive(f"its piece {number} does not fit the others")
