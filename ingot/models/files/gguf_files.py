"""Weights of a model folder that stay in the GGUF file which they came in: what lies where in it.

Imports nothing heavy. What a folder says is not trusted: whoever reads the tensors checks that the files are regular
ones, GGUF files, and as they were when the folder was made.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

import msgspec

from ingot.errors import ModelError

REFERENCES: Final = "model.gguf.json"
MOST_BYTES: Final = 64 << 20


class SourceFile(msgspec.Struct, frozen=True):
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


class References(msgspec.Struct, frozen=True):
    files: tuple[SourceFile, ...]
    tensors: dict[str, ReferencedTensor]

    def check(self) -> None:
        """Raises ModelError where a file is gone or has changed."""
        for file in self.files:
            file.check()


def references_in(folder: Path) -> References | None:
    """None where all weights are in the folder. Raises ModelError."""
    path = folder / REFERENCES
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ModelError(f"{folder.name}: {REFERENCES} is larger than any is")
        found = msgspec.json.decode(path.read_bytes(), type=References)
    except OSError as error:
        raise ModelError(f"{folder.name}: {REFERENCES} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ModelError(f"{folder.name}: {REFERENCES} does not say where weights are") from None
    return found


def write_references(folder: Path, references: References) -> None:
    (folder / REFERENCES).write_bytes(msgspec.json.encode(references) + b"\n")


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
