"""From the bytes of an expert in a file to the arrays that products read: one slot of each.

Where the products take the numbers of the files as they are, an expert is read into its slots' own memory. Otherwise
it is read beside them and brought to the slots' form as the whole layer was when it was loaded: in the native kernels'
order, or in another number format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.models.experts.files import FileRange
from ingot.models.layers.mlp import DenseSwitchLinear, PackedSwitchLinear
from ingot.upstream import QuantizedSwitchLinear, SwitchLinear

TINY: Final = 1e-30
"""A scale that no 16 bits hold: with it among them, the native kernels keep all scales as float32, as an expert that
comes later may need."""
PARTS: Final = ("weight", "scales", "biases", "bias", "global_scale")
"""The arrays that a projection may have."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """An array of a layer's experts, as it is in the files."""

    projection: str
    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]
    """Of one expert."""
    ranges: Sequence[FileRange]
    """Of each expert."""

    @property
    def size(self) -> int:
        return self.ranges[0].size

    def array(self, of: Bytes, count: int) -> mx.array:
        """So many experts' numbers, from their bytes."""
        return mx.array(of).view(self.dtype).reshape(count, *self.shape)


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The experts of a layer, as they are in the files."""

    path: str
    parts: Sequence[StoredPart]
    quantised: Mapping[str, Mapping[str, Any]]
    """By projection: bits, group size and mode, where it is quantised."""

    @property
    def count(self) -> int:
        return len(self.parts[0].ranges)

    @property
    def bytes_of_one(self) -> int:
        return sum(part.size for part in self.parts)

    def ranges_of(self, expert: int) -> list[FileRange]:
        return [part.ranges[expert] for part in self.parts]


def projections_of(module: Any) -> dict[str, Any]:
    """The linear layers of a layer's experts by name."""
    return {name: each for name, each in module.items() if isinstance(each, SwitchLinear | QuantizedSwitchLinear)}


def memory_of(array: mx.array) -> Bytes:
    """The bytes of an array [slots, ...], a row for each slot: what is written there is what the array holds. Raises
    ModelError where MLX gives a copy."""
    mx.eval(array)
    seen = array.view(mx.uint8)
    mx.eval(seen)
    memory: Bytes = np.asarray(seen).reshape(array.shape[0], -1)
    before = int(memory[-1, -1])
    memory[-1, -1] = before ^ 1
    is_shared = bool((array.view(mx.uint8).reshape(-1)[-1] == before ^ 1).item())
    memory[-1, -1] = before
    if not is_shared:
        raise ModelError("Experts cannot be read one by one here: the device's memory is not the host's")
    return memory


class SlotWeights:
    """The arrays of a layer's slots, and how an expert gets into one of them. Only the engine thread may use it, while
    nothing that reads a slot is being evaluated."""

    def __init__(self, products: nn.Module, stored: StoredExperts) -> None:
        """Raises ModelError where experts cannot be brought into the form that products have them in."""
        self._stored = stored
        linears = projections_of(products)
        self._forms = [(name, _form_of(stored, name, linear)) for name, linear in linears.items()]
        self._targets = {key: memory_of(array) for _, form in self._forms for key, array in form.targets.items()}
        self._direct = all(form.convert is None for _, form in self._forms)
        self._spare: list[list[memoryview]] = []

    def memory_for(self, slot: int) -> list[memoryview]:
        """Where to read an expert of that slot to, a range after another."""
        if self._direct:
            return [
                memoryview(self._targets[part.projection, part.name][slot])  # type: ignore[arg-type]
                for part in self._stored.parts
            ]
        if self._spare:
            return self._spare.pop()
        return [memoryview(np.empty(part.size, np.uint8)) for part in self._stored.parts]  # type: ignore[arg-type]

    def give_back(self, memory: Sequence[memoryview]) -> None:
        if not self._direct:
            self._spare.append(list(memory))

    def install(self, slot: int, read: Sequence[memoryview]) -> None:
        """Put an expert that was read into its slot."""
        if self._direct:
            return
        found = {
            (part.projection, part.name): part.array(np.frombuffer(memory, np.uint8), 1)
            for part, memory in zip(self._stored.parts, read, strict=True)
        }
        for projection, form in self._forms:
            own = {name: array for (owner, name), array in found.items() if owner == projection}
            arrays = own if form.convert is None else form.convert(own)
            for key, target in form.targets.items():
                made = arrays[key[1]].astype(target.dtype)
                made = mx.contiguous(made).view(mx.uint8)
                mx.eval(made)
                self._targets[key][slot] = np.asarray(made).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a projection's products have its weights."""

    targets: dict[tuple[str, str], mx.array]
    """[slots, ...], by projection and name."""
    convert: Callable[[dict[str, mx.array]], dict[str, mx.array]] | None
    """From one expert's arrays as they are in the files; None where these are the same bytes."""


def _form_of(stored: StoredExperts, projection: str, linear: Any) -> _Form:
    parts = {part.name: part for part in stored.parts if part.projection == projection}
    arrays = _arrays_of(linear, "bias" in parts)
    targets = {(projection, name): array for name, array in arrays.items()}
    here = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
    quantised = stored.quantised.get(projection)
    if isinstance(linear, PackedSwitchLinear):
        assert quantised is not None
        return _Form(targets, partial(_packed, quantised["group_size"], quantised["bits"]))
    if here == {name: (part.dtype, part.shape) for name, part in parts.items()}:
        return _Form(targets, None)
    if quantised is not None and "scales" not in arrays:
        return _Form(targets, partial(_unpacked, quantised))
    if {name: shape for name, (_, shape) in here.items()} != {name: part.shape for name, part in parts.items()}:
        raise ModelError(f"Experts of {stored.path} cannot be read one by one: {projection} has another shape here")
    return _Form(targets, lambda own: own)  # the same numbers in other formats


_NATIVE_NAMES: Final = ("weight", "scales", "biases")
_Arrays = dict[str, mx.array]


def _arrays_of(linear: Any, biased: bool) -> _Arrays:
    """What products read: that of native kernels may be a copy of the module's."""
    if not isinstance(linear, PackedSwitchLinear | DenseSwitchLinear):
        return {name: linear[name] for name in PARTS if linear.get(name) is not None}
    names = _NATIVE_NAMES if isinstance(linear, PackedSwitchLinear) else _NATIVE_NAMES[:1]
    return dict(zip((*names, *(["bias"] if biased else [])), linear.native.arrays, strict=True))


def _packed(group_size: int, bits: int, own: _Arrays) -> _Arrays:
    """In the native kernels' order."""
    biases, bias = own.get("biases"), own.get("bias")
    made = native.packed_weights(own["weight"], own["scales"], biases, bias, group_size, bits)
    return dict(zip((*_NATIVE_NAMES, *([] if bias is None else ["bias"])), made.arrays, strict=True))


def _unpacked(quantised: Mapping[str, Any], own: _Arrays) -> _Arrays:
    packed = own["weight"], own["scales"], own.get("biases")
    return {**own, "weight": mx.dequantize(*packed, **quantised)}
