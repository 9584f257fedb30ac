"""The LoRA adapters of one model: each has a slot, and matrices at the layers that it is for.

Only the engine thread may call anything here, between two steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.errors import AdapterError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.models.layers.decode_graph import decode_graphs_of
from ingot.models.layers.fused_layers import FusedLayers
from ingot.models.layers.gpu_linear import joined_linears_in
from ingot.models.layers.recurrent import NativeRecurrence
from ingot.models.layers.split_mixer import SplitMixer
from ingot.models.layers.swapping import allow_separate_layers
from ingot.models.lora.layers import LoraMapping, LoraMatrixStack, padded_rank, with_lora
from ingot.models.lora.weights import LoraPair, LoraWeights
from ingot.upstream import SwitchLinear

_PATH_IN_LAYERS = re.compile(r"(?:.*\.)?(layers\.\d+\..+)")


class LoadedLoras:
    def __init__(self, model: nn.Module, device: Device, dtype: mx.Dtype) -> None:
        self.mapping = LoraMapping()
        self._model, self._device, self._dtype = model, device, dtype
        self._matrices: dict[str, LoraMatrixStack] = {}  # by the path of a layer
        self._slots: dict[str, int] = {}  # by digest
        self._paths: dict[int, tuple[str, ...]] = {}  # by slot, the layers that its adapter is for

    @property
    def nbytes(self) -> int:
        return sum(matrices.nbytes for matrices in self._stacks)

    @property
    def _stacks(self) -> list[LoraMatrixStack]:
        return [*dict.fromkeys(self._matrices.values())]

    def slot(self, digest: str) -> int:
        """Of a loaded adapter."""
        return self._slots[digest]

    def __contains__(self, digest: str) -> bool:
        return digest in self._slots

    def most_bytes(self, count: int, rank: int) -> int:
        """What so many adapters of that rank take, each for every layer that there can be one for."""
        sizes = sum(sum(_layer_sizes(layer)) for path, layer in self._linear())
        return (count + 1) * padded_rank(rank) * sizes * self._dtype.size

    def add(self, weights: LoraWeights) -> int:
        """Give an adapter a slot, which is returned. Raises AdapterError before anything is changed."""
        pairs = self._pairs_by_path(weights)
        for path in pairs:
            self._swap_layer(path)
        slot = next(number for number in range(1, len(self._slots) + 2) if number not in self._slots.values())
        for path, pair in pairs.items():
            self._matrices[path].hold(path, slot, pair)
        self._slots[weights.digest] = slot
        self._paths[slot] = tuple(pairs)
        self._restack()
        return slot

    def drop(self, digest: str) -> None:
        slot = self._slots.pop(digest)
        for path in self._paths.pop(slot):
            self._matrices[path].drop(slot)
        self._restack()

    def unused_lora_layers(self, digest: str) -> list[str]:
        """Layers that the adapter is for and that were not called in a pass with adapters since this was asked last."""
        paths = self._paths[self._slots[digest]]
        unused = [path for path in paths if path not in self._matrices[path].used_paths]
        for matrices in self._stacks:
            matrices.used_paths.clear()
        return unused

    def _restack(self) -> None:
        self.mapping.order = tuple(sorted(self._slots.values()))
        self.mapping.version += 1
        for matrices in self._stacks:
            matrices.stack(self.mapping.order)

    def _linear(self) -> Iterable[tuple[str, nn.Module]]:
        """Every layer inside the model's layers that an adapter can be for."""
        for path, module in self._model.named_modules():
            if isinstance(module, nn.Linear | nn.QuantizedLinear) and _PATH_IN_LAYERS.fullmatch(path):
                yield path, module

    def _pairs_by_path(self, weights: LoraWeights) -> dict[str, LoraPair]:
        modules, layers = dict(self._model.named_modules()), len(self._model.layers)
        pairs: dict[str, LoraPair] = {}
        for stated, pair in weights.pairs.items():
            path = _module_path(stated, modules)
            self._check(stated, path, modules, pair)
            if not weights.covers(stated, layers):
                raise AdapterError(f"It holds weights for {stated[:200]}, which its configuration is not for.")
            pairs[path] = pair
        return pairs

    def _check(self, stated: str, path: str, modules: Mapping[str, nn.Module], pair: LoraPair) -> None:
        layer: Any = modules.get(path)
        if isinstance(layer, SwitchLinear) or "experts" in stated.split("."):
            raise AdapterError(f"{stated[:200]}: it adapts experts, which cannot be served.")
        if not isinstance(layer, nn.Linear | nn.QuantizedLinear) or _PATH_IN_LAYERS.fullmatch(path) is None:
            raise AdapterError(f"This model has no linear layer {stated[:200]!r} inside of its layers.")
        wanted, found = _layer_sizes(layer), (pair.a.shape[0], pair.b.shape[1])
        if found != wanted:
            raise AdapterError(
                f"{stated[:200]}: it is for a layer of {found[0]} inputs and {found[1]} outputs, this model's has "
                f"{wanted[0]} and {wanted[1]}."
            )

    def _swap_layer(self, path: str) -> None:
        """Swap the layer at `path`, and those of the same joined product, for ones with adapters."""
        if path in self._matrices:
            return
        if not self._matrices:
            self._share_mapping()
        owner, _, name = path.rpartition(".")
        modules = dict(self._model.named_modules())
        products = [each for each in joined_linears_in(modules[owner]) if name in each.names]
        names = products[0].names if products else (name,)
        paths = [f"{owner}.{each}" for each in names]
        sizes = [_layer_sizes(modules[each]) for each in paths]
        quick = self._device.kind == "cpu" and native.available() and self._dtype == mx.float32
        outputs = [size for _, size in sizes]
        matrices = LoraMatrixStack(self.mapping, paths, sizes[0][0], outputs, self._dtype, quick=quick)
        for number, each in enumerate(paths):
            self._matrices[each] = matrices
            self._model.update_modules(tree_unflatten([(each, with_lora(modules[each], matrices, number))]))
        for product in products:
            product.added = matrices

    def _share_mapping(self) -> None:
        """Give the mapping to all modules that compute several layers, or some of the tokens."""
        allow_separate_layers(self._model, self._device)
        for module in self._model.modules():
            if isinstance(module, FusedLayers | SplitMixer | NativeRecurrence):
                module._lora_mapping = self.mapping
        if (stack := decode_graphs_of(self._model)) is not None:
            stack.loras.mapping = self.mapping


def _module_path(stated: str, modules: Mapping[str, nn.Module]) -> str:
    """The path in this model of a module that an adapter's files name: they may be of a model that wraps it
    otherwise."""
    if stated in modules:
        return stated
    inside = _PATH_IN_LAYERS.fullmatch(stated)
    if inside is None:
        return stated
    ends = [path for path in modules if path == inside[1] or path.endswith(f".{inside[1]}")]
    return ends[0] if len(ends) == 1 else stated


def _layer_sizes(layer: Any) -> tuple[int, int]:
    """Inputs and outputs."""
    outputs, columns = layer.weight.shape
    return (columns * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else columns), outputs
