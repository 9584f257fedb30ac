"""Where a checkpoint has a draft head, and the head's tensors; and the classes that load the model without it.

A head is recognised by the names of its tensors; flags in configs are wrong both ways. It lies among the model's own
tensors, or in a file alongside them, which somebody put there on purpose and which is read first.

mlx-lm's `sanitize` stacks experts, splits fused attention and unpacks formats that MLX lacks, differently for each
family: it is run on the head as if that were a whole model. Some families publish the factors of norms as differences
from one, and conversions store them as they are; adding one twice gives a head that predicts little, and nothing else
shows it.
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
from ingot.models.vlm_language import language_classes_of
from ingot.upstream import packing_of

HEAD_FILE = "model-mtp.safetensors"
"""What ingot itself calls a head's file."""
HEAD_FILES = (HEAD_FILE, "mtp.safetensors", "mtp")
"""Files in a model's folder, and a subfolder, that hold its head and nothing else."""
OUTER_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
"""What the names of a model's layers may begin with."""
INDEX_FILE = "model.safetensors.index.json"
"""Maps each tensor of a checkpoint to its file."""
_CONVOLUTION = "conv1d.weight"
_OF_A_HEAD = re.compile(r"(?:^|\.)mtp[._]|\.(?:eh_proj|enorm|hnorm)\.")
"""Names that only heads have, whatever their family calls the rest."""
_LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, OUTER_PREFIXES))})layers\.(\d{{1,6}})\..*")


@dataclass(frozen=True)
class HeadSource:
    """A head that was found. Only headers have been read."""

    wiring: MtpSpec
    tensors: Mapping[str, StoredTensor]  # by their names inside the head
    location: str  # for messages
    published: bool | None
    """Whether the model's tensors around it are as published, not converted; None: unknown."""

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
    separate = (find_head_in(folder / name, config) for name in HEAD_FILES if (folder / name).exists())
    return next((found for found in separate if found is not None), None) or _head_among_weights(folder, config, wiring)


def refuse_unknown_head(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError where the checkpoint of a family whose heads are unknown has what must be one."""
    family = str(config.get("model_type"))
    name = next(filter(_OF_A_HEAD.search, CheckpointIndex(folder).files), None) if mtp_spec_of(family) is None else None
    if name is not None:
        raise ModelError(f"{folder.name} has a draft head ({name}), but heads of {family} are not supported")


def _head_among_weights(folder: Path, config: Mapping[str, Any], wiring: MtpSpec) -> HeadSource | None:
    checkpoint = CheckpointIndex(folder)
    prefix = _prefix_among(checkpoint.files, wiring, config)
    if prefix is None:
        return None
    names = [name for name in checkpoint.files if name.startswith(prefix)]
    return _head_source(wiring, checkpoint, names, prefix, folder.name, checkpoint.published)


def _prefix_among(names: Iterable[str], wiring: MtpSpec, config: Mapping[str, Any]) -> str | None:
    """What the names of a head's tensors begin with among a model's own."""
    all_names = list(names)
    for outer in OUTER_PREFIXES:
        prefix = outer + wiring.inside.format(layers=_layer_count(config))
        if any(name.startswith(f"{prefix}{wiring.joint}.") for name in all_names):
            return prefix
    return None


def find_head_in(path: Path, config: Mapping[str, Any]) -> HeadSource | None:
    """The head in a file or folder that holds little else, whatever its tensors' names begin with."""
    wiring = mtp_spec_of(str(config.get("model_type")))
    if wiring is None or not _has_tensors(path):
        return None
    checkpoint = CheckpointIndex(path) if path.is_dir() else SafetensorsFile(path)
    endings = f"{wiring.joint}.weight", f"{wiring.joint}.scales"
    ends = ((name, ending) for name in checkpoint.files for ending in endings)
    prefixes = sorted({name.removesuffix(ending) for name, ending in ends if _ends_with_part(name, ending)})
    if not prefixes:
        return None
    names = [name for name in checkpoint.files if name.startswith(prefixes[0])]
    return _head_source(wiring, checkpoint, names, prefixes[0], path.name, None)


def _has_tensors(path: Path) -> bool:
    return any(path.glob("model*.safetensors")) if path.is_dir() else path.suffix == ".safetensors"


def indexed_head_files(folder: Path, config: Mapping[str, Any]) -> list[str] | None:
    """The files of a checkpoint that a head is read from, by its index alone: none of them need exist. None where there
    is no index."""
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
    separate = read_safetensors_header(folder / HEAD_FILE) if (folder / HEAD_FILE).is_file() else {}
    return frozenset((*own, *separate))


class SafetensorsFile:
    """A safetensors file, by its header."""

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
        """Whether convolutions still have their published layout, channels before width. Where only some files of a
        checkpoint are here, there may be none to see it by."""
        convolutions = (name for name, file in self.files.items() if name.endswith(_CONVOLUTION) and file.exists())
        name = next(convolutions, None)
        return None if name is None else self.stored(name).shape[-1] != 1

    def stored(self, name: str) -> StoredTensor:
        file = self.files[name]
        if file not in self._headers:
            self._headers[file] = read_safetensors_header(file)
        if name not in self._headers[file]:
            raise ModelError(f"{file.name} lacks {name}, which is there by the checkpoint's index")
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
    """Whether it belongs to a layer behind the model's last: there may be heads for tokens still further on."""
    numbered = _LAYER.fullmatch(name) if "{layers}" in wiring.inside else None
    return numbered is not None and int(numbered[1]) >= _layer_count(config)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        valid = all(isinstance(file, str) and Path(file).name == file for file in weight_map.values())
    except OSError as error:
        raise ModelError(f"{index.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ModelError(f"{index.name} is not the index of a checkpoint")
    return weight_map


def _head_source(
    wiring: MtpSpec,
    checkpoint: SafetensorsFile | CheckpointIndex,
    names: list[str],
    prefix: str,
    location: str,
    published: bool | None,
) -> HeadSource:
    tensors = {name.removeprefix(prefix): checkpoint.stored(name) for name in names}
    return HeadSource(wiring, tensors, location, published)


def _ends_with_part(name: str, ending: str) -> bool:
    """Whether a name ends so, at the beginning of one of its parts."""
    return name == ending or name.endswith((f".{ending}", f"_{ending}"))


def _layer_count(config: Mapping[str, Any]) -> int:
    text = {**config, **(config.get("text_config") or {})}
    return int(text.get("num_hidden_layers") or 0)


_EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(.*)")
_QUANTIZED_PARTS = ("weight", "scales", "biases")


def stored_head_tensors(source: HeadSource) -> dict[str, mx.array]:
    """A head's tensors by their names in it, without copies of the model's; norms are factors. All but norms are lazy.

    Raises ModelError where they cannot be a head's.
    """
    wiring = source.wiring
    tensors = {
        name: array for name, array in _load_stored(source.tensors).items() if not name.startswith(wiring.copies)
    }
    norms = {name: array for name, array in tensors.items() if wiring.offset_norms and is_norm_weight(name)}
    return tensors | (norm_factors_of(norms, published=source.published, whose=source.location) if norms else {})


def read_head_tensors(source: HeadSource, alone: nn.Module) -> dict[str, mx.array]:
    """The same by the names of the head's modules. `alone` is the model of nothing but its layers."""
    wiring = source.wiring
    named = {_head_module_name(wiring, name): array for name, array in stored_head_tensors(source).items()}
    # mlx-lm's code may shift the norms of a layer, which was done above.
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
            raise ModelError(f"{file.name} cannot be read: it is damaged, or no safetensors file") from error
    return {name: loaded[tensor.file][tensor.name] for name, tensor in tensors.items()}


def is_norm_weight(name: str) -> bool:
    module, _, part = name.rpartition(".")
    return part == "weight" and "norm" in module.rstrip(".0123456789").rpartition(".")[2]


def _head_module_name(wiring: MtpSpec, name: str) -> str:
    """A tensor's name in the head's module."""
    parts = {
        wiring.embedding_norm: "embedding_norm",
        wiring.hidden_norm: "hidden_norm",
        wiring.joint: "joint",
        wiring.norm: "norm",
        wiring.output: "output",
    }
    module, _, part = name.rpartition(".")
    if module in parts:
        return f"{parts[module]}.{part}"
    for number, begins in enumerate(wiring.layers):
        if name.startswith(begins):
            inside = name.removeprefix(begins)
            for alias, own in wiring.aliases.items():
                inside = inside.replace(alias, own, 1)
            return f"layers.{number}.{inside}"
    return name


def _sanitized_layers(layers: dict[str, mx.array], alone: Any, wiring: MtpSpec) -> dict[str, mx.array]:
    weights = {wiring.stored + name.removeprefix("layers."): array for name, array in layers.items()}
    if hasattr(alone, "sanitize"):
        try:
            weights = alone.sanitize(weights)
        # mlx-lm's code expects a whole checkpoint; what it misses is named below.
        except (KeyError, ValueError) as error:
            raise ModelError(f"The head's tensors are not those of its family: {error} is missing or wrong") from error
    inside = path_of_layers(alone)
    return _stack_experts({f"layers.{name.removeprefix(f'{inside}.')}": array for name, array in weights.items()})


def path_of_layers(model: Any) -> str:
    """The module path of a model's layers."""
    first = model.layers[0]
    path = next(path for path, module in model.named_modules() if module is first)
    return path.removesuffix(".0")


def _stack_experts(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Stack experts that are still separate tensors, as mlx-lm's modules have them."""
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
    return {
        _head_module_name(source.wiring, stored[path]).removesuffix(".weight"): kind
        for path, kind in kinds.items()
        if path in stored
    }


def quantize_like(head: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    """Give `head` quantised layers where its tensors are quantised, each in its own format.

    Raises ModelError where a layer lacks scales or biases.
    """
    packed = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    bare = [
        name for name, array in tensors.items() if array.dtype == mx.uint32 and name[: -len(".weight")] not in packed
    ]
    lacking = [path for path in packed if not _is_complete(path, tensors)]
    if bare or lacking:
        raise ModelError(f"The head's quantised weights lack scales or biases: {', '.join(sorted([*bare, *lacking]))}")

    def described(path: str, module: Any) -> bool | dict[str, Any]:
        return packing_of(path, module, tensors) if path in packed else False

    try:
        nn.quantize(head, class_predicate=described)
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        raise ModelError(f"The head's quantised weights have no known format: {error}") from error


def _is_complete(path: str, tensors: Mapping[str, mx.array]) -> bool:
    affine = tensors[f"{path}.scales"].dtype != mx.uint8
    return all(f"{path}.{part}" in tensors for part in (_QUANTIZED_PARTS if affine else _QUANTIZED_PARTS[:2]))


LOWEST_MEAN, BETWEEN_MEANS, HIGHEST_MEAN = -0.9, 0.5, 100.0
"""Means of a norm's weights: differences from one lie from the first to the second, factors from that to the last."""


def norm_factors_of(norms: Mapping[str, mx.array], *, published: bool | None, whose: str) -> dict[str, mx.array]:
    """The norms' factors. `published`: whether the tensors around them are as published, where that is known; a head
    that was added to a converted model may be stored either way, so that its own numbers decide.

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
    """Finds classes that load the model in `folder` as it is stored there: with GGUF blocks, with tensors that stayed
    in a GGUF file, and without the tensors of a head, which not all of mlx-lm's code skips by itself."""
    heads = head_tensor_names(folder, config)
    vision = VISION_FAMILIES.get(str(config.get("model_type")))
    plain = language_classes_of if vision is None or vision.language is None else language_classes(vision.language)
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
