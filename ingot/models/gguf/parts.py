"""A model's GGUF files: one, or several parts that any one of them leads to."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ingot.errors import ModelError
from ingot.models.gguf.file import GGUFFile, TensorEntry

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
MOST_NAMED = 8  # of missing parts


@dataclass(frozen=True, slots=True)
class PartName:
    """What the name of a part says: which of how many."""

    stem: str
    number: int  # from 1
    count: int


def part_name(name: str) -> PartName | None:
    """None for a name that says nothing of parts."""
    said = _NUMBERED.fullmatch(name)
    return said and PartName(said["stem"], int(said["number"]), int(said["count"]))


def parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` is, or is a part of, in order. Raises ModelError that names missing ones."""
    said = part_name(path.name)
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
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise ModelError(
            f"{path.name} is one of {said.count} parts, of which these are missing beside it: "
            f"{', '.join(missing[:MOST_NAMED])}{more}"
        )
    return [there[name] for name in wanted]


class GGUFModel:
    """What the files of one model hold together; a context manager. Arrays from `rows` must not outlive it.

    The first part has the metadata of all; each has the places of its own tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._homes: dict[str, GGUFFile] = {}
        with ExitStack() as stack:
            self._files = [stack.enter_context(GGUFFile(part)) for part in parts_of(path)]
            self._check_split()
            self._join()
            self._open = stack.pop_all()
        self.metadata: dict[str, Any] = self._files[0].metadata

    def __enter__(self) -> GGUFModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def rows(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor as raw bytes, one row a line, copied out of its file."""
        return self._homes[entry.name].rows(entry, start, stop)

    def check_bounds(self, entry: TensorEntry) -> None:
        self._homes[entry.name].check_bounds(entry)

    def _check_split(self) -> None:
        """Each file is the part that its name says."""
        for number, file in enumerate(self._files):
            count = file.metadata.get("split.count", 1) or 1
            if count != len(self._files):
                raise ModelError(
                    f"{file.path.name} is one of {count} parts by its split.count, and there are {len(self._files)} by "
                    f"its name; name them as they were published, as in NAME-00001-of-{_padded(count)}.gguf"
                )
            if count > 1 and file.metadata.get("split.no") != number:
                said = file.metadata.get("split.no")
                raise ModelError(f"{file.path.name} holds another part than its name says: its split.no is {said!r}")

    def _join(self) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        for file in self._files:
            for name, entry in file.tensors.items():
                if name in self._homes:
                    raise ModelError(
                        f"{file.path.name} and {self._homes[name].path.name} both hold the tensor {name!r}"
                    )
                self.tensors[name], self._homes[name] = entry, file
        stated = self._files[0].metadata.get("split.tensors.count", len(self.tensors))
        if len(self._files) > 1 and stated != len(self.tensors):
            raise ModelError(
                f"the parts of {self.path.name} hold {len(self.tensors)} tensors, not {stated} as they say"
            )


def _padded(count: Any) -> str:
    return f"{count:05}" if isinstance(count, int) else str(count)
