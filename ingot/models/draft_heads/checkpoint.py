"""Where a checkpoint holds a draft head, and the head's tensors; and the classes that load the model without it.

A head is told by the names of its tensors; flags in configs are wrong both ways. It lies among the model's own tensors,
or in a file beside them, which somebody put there on purpose and is looked at first.

mlx-lm's code stacks experts, splits what attention fuses and unpacks formats that MLX lacks, each family in its way: it
is asked to do the same for the head, as if that were all of a model. What norms multiply by is published by some
families as its difference from one, and stored by conversions as it is; adding one twice gives a head that predicts
little, and nothing else shows it.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.families.description import MtpSpec
from ingot.models.families.registry import mtp_spec_of
from ingot.models.files.folder_checks import StoredTensor, read_safetensors_header
from ingot.models.gguf.quant_types import BLOCKS_KEY
from ingot.models.gguf.weights import with_gguf_blocks, with_gguf_tensors
from ingot.models.vision.loading import VISION_FAMILIES
from ingot.models.vision.tower import language_classes
from ingot.upstream import model_classes, packing_of

HEAD_FILE = "model-mtp.safetensors"
"""What ingot itself calls a head's file."""
HEAD_PLACES = (HEAD_FILE, "mtp.safetensors", "mtp")
"""Files beside a model, and a folder, that hold its head and nothing else."""
OUTER_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
"""What checkpoints name the modules around a model's layers."""
INDEX_FILE = "model.safetensors.index.json"
"""What says which file of a checkpoint holds a tensor."""
_CONVOLUTION = "conv1d.weight"
_OF_A_HEAD = re.compile(r"(?:^|\.)mtp[._]|\.(?:eh_proj|enorm|hnorm)\.")
"""Names that only heads have, whatever their family calls the rest."""
_LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, OUTER_PREFIXES))})layers\.(\d{{1,6}})\..*")


@dataclass(frozen=True)
class HeadSource:
    """A head that was found. Nothing of it but headers has been read."""

    wiring: MtpSpec
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
    wiring = mtp_spec_of(str(config.get("model_type")))
    if wiring is None:
        return None
    beside = (find_head_in(folder / place, config) for place in HEAD_PLACES if (folder / place).exists())
    return next((found for found in beside if found is not None), None) or _head_among_weights(folder, config, wiring)


def refuse_unknown_head(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError where the checkpoint of a family whose heads are not known holds what must be one."""
    family = str(config.get("model_type"))
    name = next(filter(_OF_A_HEAD.search, CheckpointIndex(folder).files), None) if mtp_spec_of(family) is None else None
    if name is not None:
        raise ModelError(f"{folder.name} holds a head ({name}), but those of {family} are not known here")


def _head_among_weights(folder: Path, config: Mapping[str, Any], wiring: MtpSpec) -> HeadSource | None:
    checkpoint = CheckpointIndex(folder)
    prefix = _prefix_among(checkpoint.files, wiring, config)
    if prefix is None:
        return None
    names = [name for name in checkpoint.files if name.startswith(prefix)]
    return _head_source(wiring, checkpoint, names, prefix, folder.name, checkpoint.published)


def _prefix_among(names: Iterable[str], wiring: MtpSpec, config: Mapping[str, Any]) -> str | None:
    """What the names of a head's tensors begin with among a model's own."""
    known = list(names)
    for around in OUTER_PREFIXES:
        prefix = around + wiring.inside.format(layers=_layer_count(config))
        if any(name.startswith(f"{prefix}{wiring.joint}.") for name in known):
            return prefix
    return None


def find_head_in(place: Path, config: Mapping[str, Any]) -> HeadSource | None:
    """The head in a file or folder that holds little else, whatever its tensors' names begin with."""
    wiring = mtp_spec_of(str(config.get("model_type")))
    if wiring is None or not _holds_tensors(place):
        return None
    held = CheckpointIndex(place) if place.is_dir() else SafetensorsFile(place)
    prefixes = sorted(
        {
            name.removesuffix(ending)
            for name in held.files
            for ending in _joint_names(wiring)
            if _ends_with_part(name, ending)
        }
    )
    if not prefixes:
        return None
    names = [name for name in held.files if name.startswith(prefixes[0])]
    return _head_source(wiring, held, names, prefixes[0], place.name, None)


def _holds_tensors(place: Path) -> bool:
    return any(place.glob("model*.safetensors")) if place.is_dir() else place.suffix == ".safetensors"


def indexed_head_files(folder: Path, config: Mapping[str, Any]) -> list[str] | None:
    """The files of a checkpoint that a head is read from, by its index alone: none of them need be there. None where
    there is no index."""
    wiring = mtp_spec_of(str(config.get("model_type")))
    if wiring is None or not (folder / INDEX_FILE).is_file():
        return None
    files = _weight_map(folder / INDEX_FILE)
    prefix = _prefix_among(files, wiring, config)
    return sorted({file for name, file in files.items() if prefix is not None and name.startswith(prefix)})


def head_tensor_names(folder: Path, config: Mapping[str, Any]) -> frozenset[str]:
    """The names of all tensors in `model*.safetensors` that are a head's and none of the model's."""
    wiring = mtp_spec_of(str(config.get("model_type")))
    if wiring is None:
        return frozenset()
    names = CheckpointIndex(folder).files
    prefix = _prefix_among(names, wiring, config)
    own = (name for name in names if (prefix and name.startswith(prefix)) or _is_after_last_layer(name, wiring, config))
    beside = read_safetensors_header(folder / HEAD_FILE) if (folder / HEAD_FILE).is_file() else {}
    return frozenset((*own, *beside))


class SafetensorsFile:
    """A safetensors file, and what it holds."""

    def __init__(self, file: Path) -> None:
        self._header = read_safetensors_header(file)
        self.files: Mapping[str, Path] = dict.fromkeys(self._header, file)

    def stored(self, name: str) -> StoredTensor:
        return self._header[name]


class CheckpointIndex:
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
            self._headers[file] = read_safetensors_header(file)
        if name not in self._headers[file]:
            raise ModelError(f"{file.name} does not hold {name}, which the checkpoint's index says it does")
        return self._headers[file][name]

    def _listed(self) -> Iterator[tuple[str, Path]]:
        index = self._folder / INDEX_FILE
        if index.is_file():
            yield from ((name, self._folder / file) for name, file in _weight_map(index).items() if file != HEAD_FILE)
            return
        for file in sorted(self._folder.glob("model*.safetensors")):
            if file.name != HEAD_FILE:
                self._headers[file] = read_safetensors_header(file)
                yield from ((name, file) for name in self._headers[file])


def _is_after_last_layer(name: str, wiring: MtpSpec, config: Mapping[str, Any]) -> bool:
    """Whether it is of a layer behind the model's last: there may be heads for tokens still further on."""
    numbered = _LAYER.fullmatch(name) if "{layers}" in wiring.inside else None
    return numbered is not None and int(numbered[1]) >= _layer_count(config)


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


def _head_source(
    wiring: MtpSpec,
    held: SafetensorsFile | CheckpointIndex,
    names: list[str],
    prefix: str,
    said: str,
    published: bool | None,
) -> HeadSource:
    tensors = {name.removeprefix(prefix): held.stored(name) for name in names}
    return HeadSource(wiring, tensors, said, published)


def _joint_names(wiring: MtpSpec) -> tuple[str, ...]:
    return f"{wiring.joint}.weight", f"{wiring.joint}.scales"


def _ends_with_part(name: str, ending: str) -> bool:
    """Whether a name ends so, at the beginning of a word of it."""
    return name == ending or name.endswith((f".{ending}", f"_{ending}"))


def _layer_count(config: Mapping[str, Any]) -> int:
    text = {**config, **(config.get("text_config") or {})}
    return int(text.get("num_hidden_layers") or 0)


_EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(.*)")
_QUANTIZED_PARTS = ("weight", "scales", "biases")


def stored_head_tensors(source: HeadSource) -> dict[str, mx.array]:
    """A head's tensors by their names in it, but copies of the model's; what norms hold is what they multiply by. Lazy,
    but for norms.

    Raises ModelError where they cannot be a head's.
    """
    wiring = source.wiring
    tensors = {
        name: array for name, array in _load_stored(source.tensors).items() if not name.startswith(wiring.copies)
    }
    norms = {name: array for name, array in tensors.items() if wiring.offset_norms and is_norm_weight(name)}
    return tensors | (norm_factors_of(norms, published=source.published, whose=source.said) if norms else {})


def read_head_tensors(source: HeadSource, alone: nn.Module) -> dict[str, mx.array]:
    """The same by the names of the head's modules. `alone` is the model of nothing but its layers."""
    wiring = source.wiring
    named = {_head_module_name(wiring, name): array for name, array in stored_head_tensors(source).items()}
    # What mlx-lm's code makes of a layer may shift its norms, which is done.
    done = {name for name in named if not name.startswith("layers.") or (wiring.offset_norms and is_norm_weight(name))}
    layers = {name: array for name, array in named.items() if name not in done}
    return {name: named[name] for name in done} | _sanitized_layers(layers, alone, wiring)


def _load_stored(tensors: Mapping[str, StoredTensor]) -> dict[str, mx.array]:
    files = {tensor.file for tensor in tensors.values()}
    loaded: dict[Any, Any] = {}
    for file in files:
        try:
            loaded[file] = mx.load(str(file))
        except RuntimeError as error:
            raise ModelError(f"{file.name} cannot be read: it is damaged or no safetensors file") from error
    return {name: loaded[tensor.file][tensor.name] for name, tensor in tensors.items()}


def is_norm_weight(name: str) -> bool:
    module, _, part = name.rpartition(".")
    return part == "weight" and "norm" in module.rstrip(".0123456789").rpartition(".")[2]


def _head_module_name(wiring: MtpSpec, name: str) -> str:
    """What the head's module calls a tensor."""
    parts = {
        wiring.embedding_norm: "embedding_norm",
        wiring.hidden_norm: "hidden_norm",
        wiring.joint: "joint",
        wiring.norm: "norm",
    }
    module, _, part = name.rpartition(".")
    if module in parts:
        return f"{parts[module]}.{part}"
    for number, begins in enumerate(wiring.layers):
        if name.startswith(begins):
            return f"layers.{number}.{name.removeprefix(begins)}"
    return name


def _sanitized_layers(layers: dict[str, mx.array], alone: Any, wiring: MtpSpec) -> dict[str, mx.array]:
    weights = {wiring.stored + name.removeprefix("layers."): array for name, array in layers.items()}
    if hasattr(alone, "sanitize"):
        try:
            weights = alone.sanitize(weights)
        # mlx-lm's code expects a whole checkpoint; what it misses is told by name below.
        except (KeyError, ValueError) as error:
            raise ModelError(f"The head's tensors are not those of its family: {error} is missing or wrong") from error
    inside = path_of_layers(alone)
    return _stack_experts({f"layers.{name.removeprefix(f'{inside}.')}": array for name, array in weights.items()})


def path_of_layers(model: Any) -> str:
    """Where in a model its layers lie."""
    first = model.layers[0]
    path = next(path for path, module in model.named_modules() if module is first)
    return path.removesuffix(".0")


def _stack_experts(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Experts that are still tensors of their own as one each, as mlx-lm's modules have them."""
    experts: dict[str, dict[int, mx.array]] = {}
    others: dict[str, mx.array] = {}
    for name, array in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            others[name] = array
        else:
            experts.setdefault(f"{match[1]}switch_mlp.{match[3]}", {})[int(match[2])] = array
    return others | {name: mx.stack([own[number] for number in sorted(own)]) for name, own in experts.items()}


def head_blocks(source: HeadSource, config: Mapping[str, Any]) -> dict[str, str]:
    """The head's modules whose weights are still blocks of a GGUF file, and of which kind."""
    kinds: Mapping[str, str] = config.get(BLOCKS_KEY) or {}
    stored = {tensor.name.removesuffix(".weight"): name for name, tensor in source.tensors.items()}
    held = {stored[path]: kind for path, kind in kinds.items() if path in stored}
    return {_head_module_name(source.wiring, name).removesuffix(".weight"): kind for name, kind in held.items()}


def quantize_like(head: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    """Give `head` packed layers where its tensors are packed: each as it is, whatever the model's are.

    Raises ModelError where a layer lacks part of what unpacks it.
    """
    packed = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    bare = [
        name for name, array in tensors.items() if array.dtype == mx.uint32 and name[: -len(".weight")] not in packed
    ]
    lacking = [path for path in packed if not _is_complete(path, tensors)]
    if bare or lacking:
        raise ModelError(f"The head's packed weights lack scales or biases: {', '.join(sorted([*bare, *lacking]))}")

    def described(path: str, module: Any) -> bool | dict[str, Any]:
        return packing_of(path, module, tensors) if path in packed else False

    try:
        nn.quantize(head, class_predicate=described)
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        raise ModelError(f"The head's packed weights are of no known form: {error}") from error


def _is_complete(path: str, tensors: Mapping[str, mx.array]) -> bool:
    affine = tensors[f"{path}.scales"].dtype != mx.uint8
    return all(f"{path}.{part}" in tensors for part in (_QUANTIZED_PARTS if affine else _QUANTIZED_PARTS[:2]))


LOWEST_MEAN, BETWEEN_MEANS, HIGHEST_MEAN = -0.9, 0.5, 100.0
"""Means of a norm's weights: differences from one lie from the first to the second, factors from that to the last."""


def norm_factors_of(norms: Mapping[str, mx.array], *, published: bool | None, whose: str) -> dict[str, mx.array]:
    """The norms' factors. `published` says whether the tensors around them are as they were published, if anything
    does; a head that was joined to a converted model may be stored either way, so that then its own numbers tell.

    Raises ModelError where they are neither.
    """
    middle = statistics.median(_norm_means(norms))
    if not LOWEST_MEAN <= middle <= HIGHEST_MEAN:
        raise ModelError(
            f"The norms of the head in {whose} are neither factors nor differences from one: their mean is {middle:.3g}"
        )
    differences = middle < BETWEEN_MEANS or bool(published)
    return {name: norm + 1 if differences else norm for name, norm in norms.items()}


def _norm_means(norms: Mapping[str, mx.array]) -> list[float]:
    means: list[Any] = [mx.mean(norm.astype(mx.float32)).item() for norm in norms.values()]
    return [mean if math.isfinite(mean) else math.inf for mean in means]


def model_classes_for(folder: Path, config: Mapping[str, Any]) -> Callable[..., tuple[type, type]]:
    """What finds the classes of the model in `folder`, such as load it as it is stored there: with blocks of GGUF's,
    with what stayed in such a file, and without the tensors of a head, over which not all of mlx-lm's code gets by
    itself."""
    heads = head_tensor_names(folder, config)
    seeing = VISION_FAMILIES.get(str(config.get("model_type")))
    plain = model_classes if seeing is None or seeing.language is None else language_classes(seeing.language)
    classes = with_gguf_blocks(plain, heads)
    if not heads:
        return with_gguf_tensors(classes, folder)

    def found(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = classes(config=config)

        class Headless(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                own = {name: weight for name, weight in weights.items() if name not in heads}
                return super().sanitize(own) if hasattr(model_class, "sanitize") else own

        return Headless, args_class

    return with_gguf_tensors(found, folder)
