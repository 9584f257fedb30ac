"""GGUF files seen from outside: which parts a split model has, and which tensors of a model folder stay in a GGUF file.

A folder that was made from a GGUF file may leave weights in it and say where they lie (`GgufReferences`). What a folder
says is not trusted: whoever reads the tensors checks that the files are regular ones, GGUF files, and as they were when
the folder was made. Nothing here opens a GGUF file, and nothing heavy is imported.
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
            raise ModelError(
                f"its weights are in {self.path}, which has changed: serve that file, and it is looked at anew"
            )


class ReferencedTensor(msgspec.Struct, frozen=True):
    """`pieces` are numbers of files and offsets in them; of several, each has an expert's matrix."""

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
            raise ModelError(f"{folder.name}: {REFERENCES_FILE} is larger than any is")
        found = msgspec.json.decode(path.read_bytes(), type=GgufReferences)
    except OSError as error:
        raise ModelError(f"{folder.name}: {REFERENCES_FILE} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ModelError(f"{folder.name}: {REFERENCES_FILE} does not say where weights are") from None
    return found


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
    """Of all those files together."""
    return sum(file.stat().st_size for file in weight_files(folder))


_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
MOST_PARTS_NAMED = 8  # of missing parts


@dataclass(frozen=True, slots=True)
class GgufPartName:
    """What the name of a part says: which of how many."""

    stem: str
    number: int  # from 1
    count: int


def gguf_part_name(name: str) -> GgufPartName | None:
    """None for a name that says nothing of parts."""
    said = _NUMBERED.fullmatch(name)
    return said and GgufPartName(said["stem"], int(said["number"]), int(said["count"]))


def gguf_parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` is, or is a part of, in order. Raises ModelError that names missing ones."""
    said = gguf_part_name(path.name)
    if said is None:
        return [path]
    if not 1 <= said.number <= said.count:
        raise ModelError(f"{path.name} calls itself part {said.number} of {said.count}")
    there = {found.name: found for found in path.parent.iterdir()}
    # The names of one split differ in their number alone, and in letters' case nowhere.
    tail = path.name[len(said.stem) + 6 :]
    wanted = [f"{said.stem}-{number:05}{tail}" for number in range(1, said.count + 1)]
    missing = [name for name in wanted if name not in there]
    if missing:
        more = f" and {len(missing) - MOST_PARTS_NAMED} more" if len(missing) > MOST_PARTS_NAMED else ""
        raise ModelError(
            f"{path.name} is one of {said.count} parts, of which these are missing beside it: "
            f"{', '.join(missing[:MOST_PARTS_NAMED])}{more}"
        )
    return [there[name] for name in wanted]
