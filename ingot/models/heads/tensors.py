"""A head's tensors under the names of its modules here, as mlx-lm's own code would have them for a model's layers.

That code stacks experts, splits what attention fuses and unpacks formats that MLX lacks, each family in its way: it is
asked to do the same for the head, as if that were all of a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.draft_heads.checkpoint import HeadSource
from ingot.models.families.description import HeadWiring
from ingot.models.files.safetensors_header import StoredTensor
from ingot.models.gguf.quant_types import BLOCKS_KEY
from ingot.models.heads.norms import factors
from ingot.upstream import packing_of

_EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(.*)")
_PARTS = ("weight", "scales", "biases")


def stored_tensors(source: HeadSource) -> dict[str, mx.array]:
    """A head's tensors by their names in it, but copies of the model's; what norms hold is what they multiply by. Lazy,
    but for norms.

    Raises ModelError where they cannot be a head's.
    """
    wiring = source.wiring
    tensors = {name: array for name, array in _read(source.tensors).items() if not name.startswith(wiring.copies)}
    norms = {name: array for name, array in tensors.items() if wiring.offset_norms and is_norm(name)}
    return tensors | (factors(norms, published=source.published, whose=source.said) if norms else {})


def read_tensors(source: HeadSource, alone: nn.Module) -> dict[str, mx.array]:
    """The same by the names of the head's modules. `alone` is the model of nothing but its layers."""
    wiring = source.wiring
    named = {_ours(wiring, name): array for name, array in stored_tensors(source).items()}
    # What mlx-lm's code makes of a layer may shift its norms, which is done.
    done = {name for name in named if not name.startswith("layers.") or (wiring.offset_norms and is_norm(name))}
    layers = {name: array for name, array in named.items() if name not in done}
    return {name: named[name] for name in done} | _as_upstream(layers, alone, wiring)


def _read(tensors: Mapping[str, StoredTensor]) -> dict[str, mx.array]:
    files = {tensor.file for tensor in tensors.values()}
    loaded: dict[Any, Any] = {}
    for file in files:
        try:
            loaded[file] = mx.load(str(file))
        except RuntimeError as error:
            raise ModelError(f"{file.name} cannot be read: it is damaged or no safetensors file") from error
    return {name: loaded[tensor.file][tensor.name] for name, tensor in tensors.items()}


def is_norm(name: str) -> bool:
    module, _, part = name.rpartition(".")
    return part == "weight" and "norm" in module.rstrip(".0123456789").rpartition(".")[2]


def _ours(wiring: HeadWiring, name: str) -> str:
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


def _as_upstream(layers: dict[str, mx.array], alone: Any, wiring: HeadWiring) -> dict[str, mx.array]:
    weights = {wiring.stored + name.removeprefix("layers."): array for name, array in layers.items()}
    if hasattr(alone, "sanitize"):
        try:
            weights = alone.sanitize(weights)
        # mlx-lm's code expects a whole checkpoint; what it misses is told by name below.
        except (KeyError, ValueError) as error:
            raise ModelError(f"The head's tensors are not those of its family: {error} is missing or wrong") from error
    inside = path_of_layers(alone)
    return _stacked({f"layers.{name.removeprefix(f'{inside}.')}": array for name, array in weights.items()})


def path_of_layers(model: Any) -> str:
    """Where in a model its layers lie."""
    first = model.layers[0]
    path = next(path for path, module in model.named_modules() if module is first)
    return path.removesuffix(".0")


def _stacked(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
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


def blocks_in(source: HeadSource, config: Mapping[str, Any]) -> dict[str, str]:
    """The head's modules whose weights are still blocks of a GGUF file, and of which kind."""
    kinds: Mapping[str, str] = config.get(BLOCKS_KEY) or {}
    stored = {tensor.name.removesuffix(".weight"): name for name, tensor in source.tensors.items()}
    held = {stored[path]: kind for path, kind in kinds.items() if path in stored}
    return {_ours(source.wiring, name).removesuffix(".weight"): kind for name, kind in held.items()}


def pack_like(head: nn.Module, tensors: Mapping[str, mx.array]) -> None:
    """Give `head` packed layers where its tensors are packed: each as it is, whatever the model's are.

    Raises ModelError where a layer lacks part of what unpacks it.
    """
    packed = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    bare = [
        name for name, array in tensors.items() if array.dtype == mx.uint32 and name[: -len(".weight")] not in packed
    ]
    lacking = [path for path in packed if not _whole(path, tensors)]
    if bare or lacking:
        raise ModelError(f"The head's packed weights lack scales or biases: {', '.join(sorted([*bare, *lacking]))}")

    def described(path: str, module: Any) -> bool | dict[str, Any]:
        return packing_of(path, module, tensors) if path in packed else False

    try:
        nn.quantize(head, class_predicate=described)
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        raise ModelError(f"The head's packed weights are of no known form: {error}") from error


def _whole(path: str, tensors: Mapping[str, mx.array]) -> bool:
    affine = tensors[f"{path}.scales"].dtype != mx.uint8
    return all(f"{path}.{part}" in tensors for part in (_PARTS if affine else _PARTS[:2]))
