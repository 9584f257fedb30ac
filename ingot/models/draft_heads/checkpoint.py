"""Where a checkpoint holds a head, told by the names of its tensors. Flags in configs are wrong both ways.

A head lies among the model's own tensors, or in a file beside them, which somebody put there on purpose and is looked
at first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ingot.errors import ModelError
from ingot.models.families.description import HeadWiring
from ingot.models.families.registry import head_of
from ingot.models.files.safetensors_header import StoredTensor, read_header

SIDE_FILE = "model-mtp.safetensors"
"""What ingot itself calls a head's file."""
SIDE_PLACES = (SIDE_FILE, "mtp.safetensors", "mtp")
"""Files beside a model, and a folder, that hold its head and nothing else."""
AROUND = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
"""What checkpoints name the modules around a model's layers."""
INDEX = "model.safetensors.index.json"
"""What says which file of a checkpoint holds a tensor."""
_CONVOLUTION = "conv1d.weight"
_OF_A_HEAD = re.compile(r"(?:^|\.)mtp[._]|\.(?:eh_proj|enorm|hnorm)\.")
"""Names that only heads have, whatever their family calls the rest."""
_LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, AROUND))})layers\.(\d{{1,6}})\..*")


@dataclass(frozen=True)
class HeadSource:
    """A head that was found. Nothing of it but headers has been read."""

    wiring: HeadWiring
    tensors: Mapping[str, StoredTensor]  # by their names inside the head
    said: str  # where that is, for people
    published: bool | None
    """Whether the model's tensors around it are as they were published, not converted; None: nothing tells."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        return sorted({tensor.file for tensor in self.tensors.values()})


def find_head(folder: Path, config: Mapping[str, Any]) -> HeadSource | None:
    """The head of the model in `folder`; None where there is none, or none that is known for its family.

    Raises ModelError where a file that should hold it cannot be read.
    """
    wiring = head_of(str(config.get("model_type")))
    if wiring is None:
        return None
    beside = (head_in(folder / place, config) for place in SIDE_PLACES if (folder / place).exists())
    return next((found for found in beside if found is not None), None) or _among_own(folder, config, wiring)


def refuse_unknown_head(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError where the checkpoint of a family whose heads are not known holds what must be one."""
    family = str(config.get("model_type"))
    name = next(filter(_OF_A_HEAD.search, Checkpoint(folder).files), None) if head_of(family) is None else None
    if name is not None:
        raise ModelError(f"{folder.name} holds a head ({name}), but those of {family} are not known here")


def _among_own(folder: Path, config: Mapping[str, Any], wiring: HeadWiring) -> HeadSource | None:
    checkpoint = Checkpoint(folder)
    prefix = _prefix_among(checkpoint.files, wiring, config)
    if prefix is None:
        return None
    names = [name for name in checkpoint.files if name.startswith(prefix)]
    return _source(wiring, checkpoint, names, prefix, folder.name, checkpoint.published)


def _prefix_among(names: Iterable[str], wiring: HeadWiring, config: Mapping[str, Any]) -> str | None:
    """What the names of a head's tensors begin with among a model's own."""
    known = list(names)
    for around in AROUND:
        prefix = around + wiring.inside.format(layers=_layers(config))
        if any(name.startswith(f"{prefix}{wiring.joint}.") for name in known):
            return prefix
    return None


def head_in(place: Path, config: Mapping[str, Any]) -> HeadSource | None:
    """The head in a file or folder that holds little else, whatever its tensors' names begin with."""
    wiring = head_of(str(config.get("model_type")))
    if wiring is None or not _holds_tensors(place):
        return None
    held = Checkpoint(place) if place.is_dir() else OneFile(place)
    prefixes = sorted(
        {name.removesuffix(ending) for name in held.files for ending in _endings(wiring) if _ends(name, ending)}
    )
    if not prefixes:
        return None
    names = [name for name in held.files if name.startswith(prefixes[0])]
    return _source(wiring, held, names, prefixes[0], place.name, None)


def _holds_tensors(place: Path) -> bool:
    return any(place.glob("model*.safetensors")) if place.is_dir() else place.suffix == ".safetensors"


def indexed_head_files(folder: Path, config: Mapping[str, Any]) -> list[str] | None:
    """The files of a checkpoint that a head is read from, by its index alone: none of them need be there. None where
    there is no index."""
    wiring = head_of(str(config.get("model_type")))
    if wiring is None or not (folder / INDEX).is_file():
        return None
    files = _weight_map(folder / INDEX)
    prefix = _prefix_among(files, wiring, config)
    return sorted({file for name, file in files.items() if prefix is not None and name.startswith(prefix)})


def head_tensors(folder: Path, config: Mapping[str, Any]) -> frozenset[str]:
    """The names of all tensors in `model*.safetensors` that are a head's and none of the model's."""
    wiring = head_of(str(config.get("model_type")))
    if wiring is None:
        return frozenset()
    names = Checkpoint(folder).files
    prefix = _prefix_among(names, wiring, config)
    own = (name for name in names if (prefix and name.startswith(prefix)) or _is_behind(name, wiring, config))
    beside = read_header(folder / SIDE_FILE) if (folder / SIDE_FILE).is_file() else {}
    return frozenset((*own, *beside))


class OneFile:
    """A safetensors file, and what it holds."""

    def __init__(self, file: Path) -> None:
        self._header = read_header(file)
        self.files: Mapping[str, Path] = dict.fromkeys(self._header, file)

    def stored(self, name: str) -> StoredTensor:
        return self._header[name]


class Checkpoint:
    """A folder's `model*.safetensors`, without a head's own file: which of them holds a tensor, and as what."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._headers: dict[Path, dict[str, StoredTensor]] = {}
        self.files: Mapping[str, Path] = dict(self._listed())

    @cached_property
    def published(self) -> bool | None:
        """Whether convolutions still lie as they were published, with their channels before their width. Where only
        some files of a checkpoint are here, none of them may tell."""
        named = (name for name, file in self.files.items() if name.endswith(_CONVOLUTION) and file.exists())
        name = next(named, None)
        return None if name is None else self.stored(name).shape[-1] != 1

    def stored(self, name: str) -> StoredTensor:
        file = self.files[name]
        if file not in self._headers:
            self._headers[file] = read_header(file)
        if name not in self._headers[file]:
            raise ModelError(f"{file.name} does not hold {name}, which the checkpoint's index says it does")
        return self._headers[file][name]

    def _listed(self) -> Iterator[tuple[str, Path]]:
        index = self._folder / INDEX
        if index.is_file():
            yield from ((name, self._folder / file) for name, file in _weight_map(index).items() if file != SIDE_FILE)
            return
        for file in sorted(self._folder.glob("model*.safetensors")):
            if file.name != SIDE_FILE:
                self._headers[file] = read_header(file)
                yield from ((name, file) for name in self._headers[file])


def _is_behind(name: str, wiring: HeadWiring, config: Mapping[str, Any]) -> bool:
    """Whether it is of a layer behind the model's last: there may be heads for tokens still further on."""
    numbered = _LAYER.fullmatch(name) if "{layers}" in wiring.inside else None
    return numbered is not None and int(numbered[1]) >= _layers(config)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_bytes())["weight_map"]
        sound = all(isinstance(file, str) and Path(file).name == file for file in listed.values())
    except OSError as error:
        raise ModelError(f"{index.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise ModelError(f"{index.name} is not the index of a checkpoint")
    weight_map: dict[str, str] = listed
    return weight_map


def _source(
    wiring: HeadWiring, held: OneFile | Checkpoint, names: list[str], prefix: str, said: str, published: bool | None
) -> HeadSource:
    tensors = {name.removeprefix(prefix): held.stored(name) for name in names}
    return HeadSource(wiring, tensors, said, published)


def _endings(wiring: HeadWiring) -> tuple[str, ...]:
    return f"{wiring.joint}.weight", f"{wiring.joint}.scales"


def _ends(name: str, ending: str) -> bool:
    """Whether a name ends so, at the beginning of a word of it."""
    return name == ending or name.endswith((f".{ending}", f"_{ending}"))


def _layers(config: Mapping[str, Any]) -> int:
    text = {**config, **(config.get("text_config") or {})}
    return int(text.get("num_hidden_layers") or 0)
