"""Reads GGUF files: the metadata, where each tensor lies, and the hyper-parameters of a model, in one file or several
parts.

A reader of our own, because it names what is wrong: the tensor of an unknown type, or the one beyond the end of a
half-downloaded file. Every length in the file is checked against the bytes that are there before anything of that
length is allocated. `Hyperparameters` records what was read, so that what was not can be refused. Raises ModelError.
"""

from __future__ import annotations

import math
import mmap
import struct
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ingot.errors import ModelError
from ingot.models.files.gguf_files import gguf_parts_of

GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# Keys that say how a file was made, not what the model computes.
HARMLESS = frozenset({"tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"})


class GGUFModel(AbstractContextManager["GGUFModel"]):
    """The files of one model. The first part has the metadata of all; each part lists its own tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as stack:
            self._files = [stack.enter_context(GGUFFile(part)) for part in gguf_parts_of(path)]
            self._check_split()
            self._join()
            self._open = stack.pop_all()
        self.metadata: dict[str, Any] = self._files[0].metadata

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self._files]

    def _check_split(self) -> None:
        """Each file is the part that its name says."""
        for number, file in enumerate(self._files):
            count = file.metadata.get("split.count", 1) or 1
            if count != len(self._files):
                raise ModelError(
                    f"{file.path.name} is one of {count} parts by its split.count, and there are {len(self._files)} by "
                    f"its name; name them as they were published, as in NAME-00001-of-{_padded_count(count)}.gguf"
                )
            stated = file.metadata.get("split.no")
            if count > 1 and stated != number:
                raise ModelError(f"{file.path.name} holds another part than its name says: its split.no is {stated!r}")

    def _join(self) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        for file in self._files:
            for name, entry in file.tensors.items():
                if name in self.tensors:
                    other = self.tensors[name].file.path.name
                    raise ModelError(f"{file.path.name} and {other} both hold the tensor {name!r}")
                self.tensors[name] = entry
        stated = self._files[0].metadata.get("split.tensors.count", len(self.tensors))
        if len(self._files) > 1 and stated != len(self.tensors):
            raise ModelError(
                f"the parts of {self.path.name} hold {len(self.tensors)} tensors, not {stated} as they state"
            )


def _padded_count(count: Any) -> str:
    return f"{count:05}" if isinstance(count, int) else str(count)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's location. `shape` has the fastest axis last, as numpy and Hugging Face have it."""

    file: GGUFFile
    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int  # from the start of the file

    @property
    def type(self) -> GGMLQuantizationType:
        try:
            return GGMLQuantizationType(self.type_id)
        except ValueError:
            raise ModelError(f"tensor {self.name!r} has the unknown type number {self.type_id}") from None

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        columns = self.shape[-1]
        if columns % block:
            raise ModelError(f"tensor {self.name!r}: rows of {columns} do not divide into {self.type.name} blocks")
        return columns // block * size

    @property
    def size(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as raw bytes, one row a line, copied out of the file."""
        size = self.row_bytes
        begin = self.offset + start * size
        raw = np.frombuffer(self.file.data[begin : begin + (stop - start) * size], np.uint8)
        return raw.reshape(stop - start, size)

    def check_bounds(self) -> None:
        if self.offset + self.size > len(self.file.data):
            raise ModelError(
                f"tensor {self.name!r} lies beyond the end of {self.file.path.name}: the file is cut short, fetch it "
                "again"
            )


class GGUFFile(AbstractContextManager["GGUFFile"]):
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self.data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelError(f"{path.name} is empty") from None
        try:
            self._read_header()
        except BaseException:
            self.data.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.data.close()

    def _read_header(self) -> None:
        cursor = _Cursor(self.data, self.path.name)
        if cursor.take(4) != GGUF_MAGIC:
            raise ModelError(f"{self.path.name} is not a GGUF file")
        version = cursor.scalar("<I")
        if version not in GGUF_VERSIONS:
            supported = " and ".join(str(number) for number in GGUF_VERSIONS)
            raise ModelError(
                f"{self.path.name} is GGUF version {version} or big-endian; {supported} (little-endian) are supported"
            )
        tensor_count, key_count = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata = _read_metadata(cursor, key_count)
        entries = [self._read_entry(cursor) for _ in cursor.countable(tensor_count, at_least=24)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ModelError(f"{self.path.name}: general.alignment is {alignment!r}, not a power of two")
        self.data_offset = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, TensorEntry] = {}
        for entry in entries:
            if entry.name in self.tensors:
                raise ModelError(f"{self.path.name} holds the tensor {entry.name!r} twice")
            self.tensors[entry.name] = replace(entry, offset=self.data_offset + entry.offset)

    def _read_entry(self, cursor: _Cursor) -> TensorEntry:
        name = cursor.text()
        dimensions = cursor.scalar("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ModelError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed([cursor.scalar("<Q") for _ in range(dimensions)]))
        return TensorEntry(self, name, cursor.scalar("<I"), shape, cursor.scalar("<Q"))


class _Cursor:
    """A position in the header that never moves beyond the end of the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data, self._name, self.position = data, name, 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise self._cut_short()
        found = self._data[self.position : end]
        self.position = end
        return found

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def countable(self, count: int, *, at_least: int) -> range:
        """range(count), if `count` things of `at_least` bytes can still follow."""
        if count * at_least > len(self._data) - self.position:
            raise self._cut_short()
        return range(count)

    def text(self) -> str:
        raw = self.take(self.scalar("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelError(f"{self._name}: the header holds text that is not UTF-8") from None

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.text()
        if type_id == _ARRAY:
            return self._array()
        return self.scalar(self._layout(type_id))

    def _array(self) -> list[Any]:
        type_id, count = self.scalar("<I"), self.scalar("<Q")
        if type_id == _ARRAY:
            raise ModelError(f"{self._name}: the header holds an array of arrays, which is not supported")
        if type_id == _STRING:
            return [self.text() for _ in self.countable(count, at_least=8)]
        layout = self._layout(type_id)
        width = struct.calcsize(layout)
        self.countable(count, at_least=width)
        return np.frombuffer(self.take(count * width), np.dtype(layout)).tolist()

    def _layout(self, type_id: int) -> str:
        if type_id not in _SCALARS:
            raise ModelError(f"{self._name}: the header holds a value of the unknown type number {type_id}")
        return _SCALARS[type_id]

    def _cut_short(self) -> ModelError:
        return ModelError(f"{self._name} is cut short or damaged: its header does not fit into it")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in cursor.countable(count, at_least=13):
        key = cursor.text()
        if key in metadata:
            raise ModelError(f"the header holds the key {key!r} twice")
        metadata[key] = cursor.value(cursor.scalar("<I"))
    return metadata


class Hyperparameters:
    """The hyper-parameters of one file. Records which were read, so that the others can be refused."""

    def __init__(self, file: GGUFModel, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def _same_in_layers(self, key: str, default: Any = None) -> Any:
        """A list with a value for each layer counts as that value where all are the same."""
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, list):
            raise ModelError(f"{self.architecture}.{key} differs from layer to layer, which is not supported")
        return value

    def was_read(self, key: str) -> bool:
        return key in self._read

    def setting(self, key: str) -> bool | int | float | None:
        """A flag, a whole number that is not negative, or a finite number; a list of one for each layer is accepted
        where all are the same. None where the file does not state it."""
        value = self._same_in_layers(key)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and value < 0:
            raise ModelError(f"{self.architecture}.{key} is {value}, which is negative")
        return value if isinstance(value, int) else self.number(key)

    def layers(self, key: str, count: int) -> list[int]:
        """A whole number for each of so many layers, which the file may state once for all."""
        value = self.get(key)
        values = value[:count] if isinstance(value, list) else [value] * count
        if len(values) != count or not all(type(item) is int and item >= 0 for item in values):
            raise ModelError(f"{self.architecture}.{key} is no whole number for each of {count} layers")
        return values

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a list of one for each layer is accepted where all are the same."""
        value = self._same_in_layers(key, default)
        if value is None:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.architecture}.{key} is {value!r}, not a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as the shortest decimal of its float32."""
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"the file lacks {self.architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.architecture}.{key} is {value!r}, not a number")
        return float(str(np.float32(value)))

    def refuse_unless(self, key: str, *allowed: Any) -> None:
        """For keys of which only some values are supported; an absent key has the first of them."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise ModelError(f"{self.architecture}.{key} is {value!r}, which is not supported")

    def refuse_unread(self) -> None:
        prefix = f"{self.architecture}."
        for key in self.file.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._read | HARMLESS:
                raise ModelError(f"the file sets {key}, which is not supported for {self.architecture} models")
