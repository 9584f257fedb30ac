"""Kept prefixes in a file: a safetensors file whose header says what they depend on and is covered by a checksum.

The header's metadata holds a manifest (format version, key, the tree of pieces) and a checksum over the header, with
zeros in the checksum's place, and all data. A file that was made under another key, or that is not whole, is refused
by name; nothing in it is believed before that. Pure Python: tensors are bytes here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from ingot.errors import BadRequest

FORMAT = "ingot kept prefixes, version 1"
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "I64": 8, "U8": 1}
DIGITS = 64
ZEROS = "0" * DIGITS
LONGEST_HEADER = 1 << 28
_READ = 1 << 20


class ArchiveError(BadRequest):
    """A file of kept prefixes that is foreign, damaged or not one at all."""

    code = "invalid_archive"


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return SIZES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """One node of the index: tokens behind its parent's, and what its record holds, in order.

    `deltas` has (begin, end, number of tensors) of each layer, None for recurrent ones; `checkpoint` says which parts
    of each layer's state there are.
    """

    salt: str
    parent: int  # the number of an earlier piece, or -1
    tokens: tuple[int, ...]
    begin: int
    landmark: bool
    deltas: tuple[tuple[int, int, int] | None, ...]
    checkpoint: tuple[tuple[bool, ...], ...] | None
    tensors: tuple[Tensor, ...]

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


def write(path: Path, key: Mapping[str, str], pieces: Sequence[Piece], data: Callable[[int], Iterable[bytes]]) -> None:
    """`data(i)` gives the bytes of piece i's tensors, in order; each is asked for once, one after another."""
    header = _header(key, pieces)
    digest = blake2b(header, digest_size=DIGITS // 2)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for number, piece in enumerate(pieces):
            for raw, tensor in zip(data(number), piece.tensors, strict=True):
                assert len(raw) == tensor.nbytes
                digest.update(raw)
                file.write(raw)
        file.seek(8 + header.index(ZEROS.encode()))
        file.write(digest.hexdigest().encode())


def _header(key: Mapping[str, str], pieces: Sequence[Piece]) -> bytes:
    manifest = {"format": FORMAT, "key": dict(key), "pieces": [_listed(piece) for piece in pieces]}
    metadata = {"checksum": ZEROS, "ingot": json.dumps(manifest)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for number, piece in enumerate(pieces):
        for place, tensor in enumerate(piece.tensors):
            offsets = [at, at + tensor.nbytes]
            entries[f"{number}.{place}"] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
            at += tensor.nbytes
    raw = json.dumps(entries).encode()
    return raw + b" " * (-len(raw) % 8)


def _listed(piece: Piece) -> dict[str, Any]:
    return {
        "salt": piece.salt,
        "parent": piece.parent,
        "tokens": piece.tokens,
        "begin": piece.begin,
        "landmark": piece.landmark,
        "deltas": piece.deltas,
        "checkpoint": piece.checkpoint,
        "tensors": [[tensor.dtype, *tensor.shape] for tensor in piece.tensors],
    }


@dataclass(frozen=True, slots=True)
class Archive:
    """A file that was found whole and fitting."""

    path: Path
    pieces: tuple[Piece, ...]
    offset: int  # where the data begins

    @classmethod
    def open(cls, path: Path, key: Mapping[str, str]) -> Archive:
        """Raises ArchiveError that says what is wrong with the file."""
        with path.open("rb") as file:
            header = _read_header(file)
            entries = _decoded(header)
            manifest = _manifest(entries)
            _check_sum(file, header, entries["__metadata__"]["checksum"])
        _check_key(manifest.get("key"), key)
        try:
            pieces = tuple(_piece(stated) for stated in manifest["pieces"])
        except (TypeError, ValueError, KeyError):
            raise _damaged("its list of pieces makes no sense") from None
        _check_tree(pieces)
        if sum(tensor.nbytes for piece in pieces for tensor in piece.tensors) != path.stat().st_size - 8 - len(header):
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


def _decoded(header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        raise ArchiveError("The file is no archive of kept prefixes: its header is not JSON.") from None
    if not isinstance(entries, dict):
        raise ArchiveError("The file is no archive of kept prefixes: its header is no object.")
    return entries


def _manifest(entries: dict[str, Any]) -> dict[str, Any]:
    metadata = entries.get("__metadata__")
    try:
        manifest = json.loads(metadata["ingot"]) if isinstance(metadata, dict) else None
    except (KeyError, TypeError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not isinstance(metadata, dict):
        raise ArchiveError("The file is no archive of kept prefixes: it is some other safetensors file.")
    if manifest.get("format") != FORMAT:
        raise ArchiveError(f"The file's format is {str(manifest.get('format'))[:80]!r}; this server reads {FORMAT!r}.")
    if not isinstance(metadata.get("checksum"), str):
        raise _damaged("it has no checksum")
    return manifest


def _check_sum(file: BinaryIO, header: bytes, stated: str) -> None:
    if len(stated) != DIGITS or header.count(stated.encode()) != 1:
        raise _damaged("its checksum makes no sense")
    digest = blake2b(header.replace(stated.encode(), ZEROS.encode()), digest_size=DIGITS // 2)
    while piece := file.read(_READ):
        digest.update(piece)
    if digest.hexdigest() != stated:
        raise _damaged("its checksum is not that of what is in it")


def _check_key(stated: object, key: Mapping[str, str]) -> None:
    held = stated if isinstance(stated, dict) else {}
    differing = [name for name in key if held.get(name) != key[name]]
    if differing:
        raise ArchiveError(f"The file was made with another {' and another '.join(differing)} than this server's.")


def _piece(stated: dict[str, Any]) -> Piece:
    checkpoint = stated["checkpoint"]
    return Piece(
        salt=str(stated["salt"]),
        parent=int(stated["parent"]),
        tokens=tuple(int(token) for token in stated["tokens"]),
        begin=int(stated["begin"]),
        landmark=bool(stated["landmark"]),
        deltas=tuple(None if delta is None else _triple(delta) for delta in stated["deltas"]),
        checkpoint=None if checkpoint is None else tuple(tuple(bool(part) for part in layer) for layer in checkpoint),
        tensors=tuple(_tensor(tensor) for tensor in stated["tensors"]),
    )


def _triple(stated: Sequence[Any]) -> tuple[int, int, int]:
    begin, end, count = (int(number) for number in stated)
    return begin, end, count


def _tensor(stated: Sequence[Any]) -> Tensor:
    dtype, *shape = stated
    if dtype not in SIZES or not all(isinstance(size, int) and 0 < size < 1 << 32 for size in shape):
        raise ValueError("no tensor")
    return Tensor(dtype, tuple(shape))


def _check_tree(pieces: Sequence[Piece]) -> None:
    for number, piece in enumerate(pieces):
        held = sum(delta[2] for delta in piece.deltas if delta is not None)
        held += sum(sum(layer) for layer in piece.checkpoint or ())
        parent = pieces[piece.parent] if 0 <= piece.parent < number else None
        begins = 0 if piece.parent == -1 else parent.end if parent is not None else -1
        same = parent is None or parent.salt == piece.salt
        if piece.begin != begins or not same or not piece.tokens or held != len(piece.tensors):
            raise _damaged(f"its piece {number} does not fit the others")
