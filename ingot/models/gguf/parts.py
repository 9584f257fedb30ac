"""A model's GGUF files: one, or several parts that any one of them leads to."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ingot.errors import ModelError
from ingot.models.gguf.file import GGUFFile, TensorEntry
from ingot.models.gguf.part_names import parts_of


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

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self._files]

    def path_of(self, entry: TensorEntry) -> Path:
        """The file that a tensor lies in."""
        return self._homes[entry.name].path

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
