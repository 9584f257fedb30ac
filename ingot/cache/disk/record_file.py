"""One record's file, read and checked: whole, under its own name, and bit for bit as it was written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingot.cache.disk.files import Files
from ingot.cache.disk.header import LENGTH, Damaged, Header, decoded, length_of, sums_of

RECORD: Final = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredData:
    header: Header
    tensors: tuple[memoryview, ...]


def read_header(files: Files, path: Path, nbytes: int, secret: bytes | None) -> Header:
    """Of a file of so many bytes that was sealed with this secret, or with any, without reading the rest. Raises
    Damaged or OSError."""
    length = length_of(bytes(files.read(path, LENGTH)))
    header = decoded(bytes(files.read(path, LENGTH + length)[LENGTH:]), secret)
    if header.name != path.name:
        raise Damaged("it is another record")
    if LENGTH + length + header.record.nbytes != nbytes:
        raise Damaged("it is not as long as its header says")
    return header


def read_record(files: Files, path: Path, secret: bytes | None = None) -> StoredData:
    """All of it; one that was sealed with this secret, if one is given. Raises Damaged or OSError."""
    raw = files.read(path)
    begin = LENGTH + length_of(bytes(raw[:LENGTH]))
    header = decoded(bytes(raw[LENGTH:begin]), secret)
    if header.name != path.name:
        raise Damaged("it is another record")
    tensors, at = [], begin
    for tensor in header.record.tensors:
        tensors.append(raw[at : at + tensor.nbytes])
        at += tensor.nbytes
    if raw.nbytes != at:
        raise Damaged("it is not as long as its header says")
    if sums_of(tensors) != header.sums:
        raise Damaged("a tensor has another checksum")
    return StoredData(header, tuple(tensors))
