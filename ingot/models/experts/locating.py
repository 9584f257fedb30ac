"""Where the experts of a layer lie in a model's files, whatever its family's code makes of their tensors.

An array of the model that is a file's tensor lies where that does. Families' code also stacks tensors that each have
one expert, and splits ones that have gates and up projections; then the tensors are known by their names, and the first
layer's numbers are compared with what that code makes of them. Other forms are not known here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import mlx.core as mx
import numpy as np

from ingot.models.experts.files import ExpertFiles, FileRange
from ingot.models.files.folder_checks import StoredTensor

OTHER_NAMES: Final = {
    "gate_proj": ("gate_proj", "w1"),
    "up_proj": ("up_proj", "w3"),
    "down_proj": ("down_proj", "w2"),
    "fc1": ("up_proj", "fc1"),
    "fc2": ("down_proj", "fc2"),
}
"""Of a projection in tensors of one expert each."""
HALVES: Final = {"gate_proj": 0, "up_proj": 1}
"""Which half of `gate_up_proj` a projection is."""
_OF_ONE: Final = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")
_Tensors = dict[int, tuple[int, StoredTensor]]


class ExpertLocator:
    def __init__(self, stored: Mapping[str, mx.array], files: ExpertFiles) -> None:
        """`stored` are the files' arrays as they were loaded, by name."""
        self._files = files
        self._names = {id(array): name for name, array in stored.items()}
        self._of_one: dict[tuple[str, str], _Tensors] = defaultdict(dict)
        for name, tensor in files.tensors.items():
            if (found := _OF_ONE.match(name)) is not None:
                self._of_one[found[1], found[3]][int(found[2])] = tensor
        self._compared: set[tuple[str, str]] = set()  # projections and names

    def find(self, path: str, projection: str, name: str, array: mx.array) -> list[FileRange] | None:
        """Of each expert, for an array [experts, ...] of the experts at a path in the model; None where they are in
        another form."""
        stated = self._names.get(id(array))
        if stated in self._files.records:
            return self._files.records[stated]
        if stated is not None:
            return self._parts_of_one_tensor(stated, array, 0, 1)
        block = path.rpartition(".")[0]
        for found in (self._stacked(block, projection, name, array), self._halved(block, projection, name, array)):
            if found is not None and self._is_right(found, projection, name, array):
                return found
        return None

    def _parts_of_one_tensor(self, name: str, array: mx.array, part: int, parts: int) -> list[FileRange] | None:
        number, stored = self._files.tensors[name]
        experts = array.shape[0]
        if not stored.shape or stored.shape[0] != experts or stored.nbytes != array.nbytes * parts:
            return None
        size = array.nbytes // experts
        return [FileRange(number, stored.offset + (expert * parts + part) * size, size) for expert in range(experts)]

    def _stacked(self, block: str, projection: str, name: str, array: mx.array) -> list[FileRange] | None:
        experts = array.shape[0]
        for other in OTHER_NAMES.get(projection, ()):
            tensors = self._of_one.get((f"{block}.experts", f"{other}.{name}"), {})
            found = [tensors[expert] for expert in range(experts) if expert in tensors]
            if len(found) == len(tensors) == experts and all(
                stored.nbytes * experts == array.nbytes for _, stored in found
            ):
                return [FileRange(number, stored.offset, stored.nbytes) for number, stored in found]
        return None

    def _halved(self, block: str, projection: str, name: str, array: mx.array) -> list[FileRange] | None:
        names = [f"{block}.experts.{each}{end}" for each in ("gate_up_proj", projection) for end in (f".{name}", "")]
        stated = next((each for each in names if each in self._files.tensors), None)
        if stated is None:
            return None
        is_joint = "gate_up_proj" in stated
        if is_joint and projection not in HALVES:
            stated = next((each for each in names[2:] if each in self._files.tensors), None)
            is_joint = False
        if stated is None:
            return None
        return self._parts_of_one_tensor(stated, array, HALVES[projection] if is_joint else 0, 2 if is_joint else 1)

    def _is_right(self, ranges: list[FileRange], projection: str, name: str, array: mx.array) -> bool:
        """Whether the first layer's experts are what the model's code makes of the tensors."""
        if (projection, name) in self._compared:
            return True
        held = np.empty(array.nbytes, np.uint8)
        size = array.nbytes // array.shape[0]
        for expert, place in enumerate(ranges):
            self._files.read(place, [held[expert * size : (expert + 1) * size].data])
        same = bool(mx.array_equal(mx.array(held), array.view(mx.uint8).reshape(-1)).item())
        if same:
            self._compared.add((projection, name))
        return same
