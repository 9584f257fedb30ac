"""GGUF files from outside: the parts of a split model, and the tensors of a model folder that stay in a GGUF file.

A folder that was made from a GGUF file may leave weights in it and refer to them (`GgufReferences`). References are not
trusted: reading them checks that the files are regular ones, GGUF files, and unchanged since the folder was made.
Nothing here opens a GGUF file, and nothing heavy is imported.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ingot.errors import ModelError

REFERENCES_FILE: Final = "model.gguf.json"
MOST_REFERENCES_BYTES: Final = 64 << 20
MOST_PARTS_NAMED: Final = 8  # of missing parts
_NUMBERED: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


class GgufSourceFile(msgspec.Struct, frozen=True):
    path: str
    size: int
    changed_ns: int

    def check(self) -> None:
        """Raises ModelError where the file is gone, or is another one now."""
        try:
            status = Path(self.path).stat()
        except OSError as error:
            raise ModelError(
                f"its weights are in {self.path}, which cannot be read ({error.strerror}): put it back, or serve the "
                "file from where it is now"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"its weights are in {self.path}, which is no regular file")
        if (status.st_size, status.st_mtime_ns) != (self.size, self.changed_ns):
            raise ModelError(f"its weights are in {self.path}, which has changed: serve that file again")


class ReferencedTensor(msgspec.Struct, frozen=True):
    """`pieces` are numbers of files and offsets in them; several are a matrix for each expert."""

    kind: str  # GGUF's name of the format
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    heads: int = 0  # not 0: each head's rows come in interleaved rotary order and are sorted into halves


class GgufReferences(msgspec.Struct, frozen=True):
    files: tuple[GgufSourceFile, ...]
    tensors: dict[str, ReferencedTensor]

    def check(self) -> None:
        """Raises ModelError where a file is gone or has changed."""
        for file in self.files:
            file.check()


def references_in(folder: Path) -> GgufReferences | None:
    """None where all weights are in the folder. Raises ModelError."""
    path = folder / REFERENCES_FILE
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MOST_REFERENCES_BYTES:
            raise ModelError(f"{folder.name}: {REFERENCES_FILE} is too large")
        return msgspec.json.decode(path.read_bytes(), type=GgufReferences)
    except OSError as error:
        raise ModelError(f"{folder.name}: {REFERENCES_FILE} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ModelError(f"{folder.name}: {REFERENCES_FILE} is no list of references to weights") from None


def write_references(folder: Path, references: GgufReferences) -> None:
    (folder / REFERENCES_FILE).write_bytes(msgspec.json.encode(references) + b"\n")


def weight_files(folder: Path) -> list[Path]:
    """All files that hold weights of the model in `folder`. Raises ModelError where one is gone."""
    own, elsewhere = sorted(folder.glob("model*.safetensors")), references_in(folder)
    if elsewhere is None:
        return own
    elsewhere.check()
    return [*own, *(Path(file.path) for file in elsewhere.files)]


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


@dataclass(frozen=True, slots=True)
class GgufPartName:
    """Which of how many parts a file is, by its name."""

    stem: str
    number: int  # from 1
    count: int


def gguf_part_name(name: str) -> GgufPartName | None:
    """None for a name that is not numbered."""
    matched = _NUMBERED.fullmatch(name)
    return matched and GgufPartName(matched["stem"], int(matched["number"]), int(matched["count"]))


def gguf_parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` is, or is a part of, in order. Raises ModelError that names missing ones."""
    part = gguf_part_name(path.name)
    if part is None:
        return [path]
    if not 1 <= part.number <= part.count:
        raise ModelError(f"{path.name} calls itself part {part.number} of {part.count}")
    there = {found.name: found for found in path.parent.iterdir()}
    # The names of one split differ in their number alone, and in letters' case nowhere.
    tail = path.name[len(part.stem) + 6 :]
    wanted = [f"{part.stem}-{number:05}{tail}" for number in range(1, part.count + 1)]
    missing = [name for name in wanted if name not in there]
    if missing:
        more = f" and {len(missing) - MOST_PARTS_NAMED} more" if len(missing) > MOST_PARTS_NAMED else ""
        raise ModelError(
            f"{path.name} is one of {part.count} parts, of which these are missing in its folder: "
            f"{', '.join(missing[:MOST_PARTS_NAMED])}{more}"
        )
    return [there[name] for name in wanted]
