"""Which draft head a folder holds, by the names of its tensors, and loading it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ingot.errors import ModelError
from ingot.models.adapter import ModelAdapter
from ingot.models.draft_heads.assistant import load_assistant
from ingot.models.draft_heads.block import load_block_drafter
from ingot.models.draft_heads.checkpoint import INDEX_FILE, CheckpointIndex
from ingot.models.draft_heads.drafter import Drafter, read_drafter_config
from ingot.models.draft_heads.eagle import load_eagle
from ingot.models.files.folder_checks import StoredTensor

DrafterKind = Literal["eagle", "assistant", "block"]
DRAFTER_FOLDER: Final = "mtp"
"""A folder in a model's own that may hold its drafter."""
_SIGNS: Final[Mapping[DrafterKind, tuple[frozenset[str], ...]]] = {
    "assistant": (frozenset({"pre_projection", "post_projection"}),),
    "eagle": (frozenset({"fc", "midlayer.hidden_norm"}), frozenset({"fc", "layers.0.hidden_norm"})),
    "block": (frozenset({"fc", "hidden_norm", "layers.0.self_attn.q_norm"}),),
}
"""Modules that only such a head has: all of one of these sets."""


@dataclass(frozen=True)
class DrafterFolder:
    """A folder that holds a drafter. Only headers have been read."""

    path: Path
    tensors: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.file for tensor in self.tensors.values()})

    def copy(self, target: Path) -> None:
        """Make `target`, with what a drafter is loaded from."""
        target.mkdir()
        small = (self.path / name for name in ("config.json", INDEX_FILE) if (self.path / name).is_file())
        for file in (*small, *self.files):
            shutil.copyfile(file, target / file.name)


def drafter_in(folder: Path) -> DrafterFolder | None:
    """The drafter that a folder holds, or the folder `mtp` in it. Raises ModelError where headers cannot be read."""
    path = next((each for each in (folder, folder / DRAFTER_FOLDER) if drafter_kind(each) is not None), None)
    if path is None:
        return None
    checkpoint = CheckpointIndex(path)
    return DrafterFolder(path, {name: checkpoint.stored(name) for name in checkpoint.files})


def drafter_kind(folder: Path) -> DrafterKind | None:
    """Which draft head a folder holds and nothing else; None: none that is known. Only headers are read. Raises
    ModelError where they cannot be."""
    if not (folder / "config.json").is_file():
        return None
    modules = {name.rpartition(".")[0].removeprefix("model.") for name in CheckpointIndex(folder).files}
    return next((kind for kind, signs in _SIGNS.items() if any(sign <= modules for sign in signs)), None)


def own_drafter(folder: Path) -> Path | None:
    """The drafter that lies in a model's folder."""
    inside = folder / DRAFTER_FOLDER
    return inside if drafter_kind(inside) is not None else None


def taps_layers(folder: Path) -> bool:
    """Whether the drafter in a folder reads hidden states between its model's layers."""
    return drafter_kind(folder) in ("eagle", "block")


def load_drafter(folder: Path, adapter: ModelAdapter, *, dtype: str | None = None) -> Drafter:
    """The drafter in `folder`, in memory and swapped for the adapter's device. From now on the adapter's model hands
    over the hidden states that it reads.

    Raises ModelError where it is none, is damaged, or does not belong to this model.
    """
    kind = drafter_kind(folder)
    if kind == "eagle":
        return load_eagle(folder, adapter, dtype=dtype)
    if kind is None:
        raise ModelError(f"{folder.name} holds no draft head that is known")
    load = load_assistant if kind == "assistant" else load_block_drafter
    return load(folder, read_drafter_config(folder), adapter, dtype=dtype)
