"""From the bytes of an expert in a file to the arrays that products read: one slot of each.

Where the products take the numbers of the files as they are, an expert is read into its slots' own memory. Otherwise
it is read beside them and brought to the slots' form: in the native kernels' order, or in another number format. The
first one is, as the whole layer was when it was loaded, by MLX on the engine thread; where plain operations on bytes
(`arrangement`) give the same, the thread that read an expert does that from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.dataclass import dataclass
from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.models.experts.arrangement import as_floats, find_arrangement
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


Convert = Callable[[dict[str, Bytes], dict[str, Bytes]], None]
"""From an expert's bytes as they are in the files to those of a slot, by the names of a projection's arrays."""
SpareMemory = dict[tuple[int, ...], list[Sequence[memoryview]]]
"""Memory for experts that are not read into their slots themselves, by the sizes of its parts."""


class SlotWeights:
    """The arrays of a layer's slots, and how an expert gets into one of them. Only the engine thread may use it, while
    nothing that reads a slot is being evaluated."""

    def __init__(self, products: nn.Module, stored: StoredExperts, spare: SpareMemory) -> None:
        """`spare` memory is shared by all layers. Raises ModelError where experts cannot be brought into the form that
        products have them in."""
        self._stored = stored
        self._forms = {name: _form_of(stored, name, each) for name, each in projections_of(products).items()}
        self._memory = {
            (projection, name): memory_of(array)
            for projection, form in self._forms.items()
            for name, array in form.targets.items()
        }
        self._spare = spare.setdefault(tuple(part.size for part in stored.parts), [])
        self._plain: dict[str, Convert] | None = None  # what reader threads may do
        self._has_learned = False
        self.is_direct = all(form.convert is None for form in self._forms.values())
        """Experts are read into their slots themselves."""

    def memory_for(self, slot: int) -> Sequence[memoryview]:
        """Where to read an expert of that slot to, a range after another. For any thread."""
        if self.is_direct:
            return [self._memory[part.projection, part.name][slot].data for part in self._stored.parts]
        try:
            return self._spare.pop()
        except IndexError:
            return [np.empty(part.size, np.uint8).data for part in self._stored.parts]

    def conversion(self, slot: int) -> Callable[[Sequence[memoryview]], None] | None:
        """What brings an expert that was read into its slot, on any thread; None where that is for the engine's, or
        where nothing is to be done."""
        return None if self._plain is None else partial(self._convert, self._plain, slot)

    def _convert(self, plain: Mapping[str, Convert], slot: int, read: Sequence[memoryview]) -> None:
        given, taken = self._by_projection(read), self._slot_memory(slot)
        for projection, own in plain.items():
            own(given[projection], taken[projection])
        self._spare.append(read)

    def install(self, slot: int, read: Sequence[memoryview]) -> None:
        """Bring an expert that was read into its slot. Of the first one is learned whether that can be done without
        MLX."""
        given, taken = self._by_projection(read), self._slot_memory(slot)
        for projection, form in self._forms.items():
            own = {
                part.name: part.array(given[projection][part.name], 1)
                for part in self._stored.parts
                if part.projection == projection
            }
            arrays = own if form.convert is None else form.convert(own)
            for name, target in form.targets.items():
                made = mx.contiguous(arrays[name].astype(target.dtype)).view(mx.uint8)
                mx.eval(made)
                taken[projection][name][:] = np.asarray(made).reshape(-1)
        if not self._has_learned:
            self._has_learned = True
            found = {
                name: _plain_conversion(self._stored, name, form, given[name], taken[name])
                for name, form in self._forms.items()
            }
            known = {name: each for name, each in found.items() if each is not None}
            self._plain = known if len(known) == len(found) else None
        self._spare.append(read)

    def _by_projection(self, read: Sequence[memoryview]) -> dict[str, dict[str, Bytes]]:
        found: dict[str, dict[str, Bytes]] = {name: {} for name in self._forms}
        for part, memory in zip(self._stored.parts, read, strict=True):
            found[part.projection][part.name] = np.frombuffer(memory, np.uint8)
        return found

    def _slot_memory(self, slot: int) -> dict[str, dict[str, Bytes]]:
        found: dict[str, dict[str, Bytes]] = {name: {} for name in self._forms}
        for (projection, name), memory in self._memory.items():
            found[projection][name] = memory[slot]
        return found


def _plain_conversion(
    stored: StoredExperts, projection: str, form: _Form, given: dict[str, Bytes], taken: dict[str, Bytes]
) -> Convert | None:
    """What gives the bytes that `taken` has now, without MLX; None where nothing does."""
    parts = {part.name: part for part in stored.parts if part.projection == projection}
    dtypes = {name: np.float16 if array.dtype == mx.float16 else np.float32 for name, array in form.targets.items()}
    packing = stored.quantised.get(projection)
    if packing is None or "weight" not in taken or form.convert is None or "biases" not in taken:
        return None
    found = find_arrangement(packing, parts["weight"].shape[0], given["weight"], taken["weight"])
    if found is None:
        return None

    def convert(given: dict[str, Bytes], taken: dict[str, Bytes]) -> None:
        found.quanta(given["weight"], taken["weight"])
        scales, biases = (taken[name].view(dtypes[name]) for name in ("scales", "biases"))
        if found.mxfp4:
            found.mxfp4_factors(given["scales"], scales, biases)
        else:
            found.factors(given["scales"], parts["scales"].dtype, scales)
            found.factors(given["biases"], parts["biases"].dtype, biases)
        if "bias" in taken:
            taken["bias"].view(np.float32)[:] = as_floats(given["bias"], parts["bias"].dtype)

    tried = {name: np.zeros_like(memory) for name, memory in taken.items()}
    convert(given, tried)
    return convert if all(np.array_equal(tried[name], memory) for name, memory in taken.items()) else None


@dataclass(frozen=True, slots=True)
class _Form:
    """How a projection's products have its weights."""

    targets: dict[str, mx.array]
    """[slots, ...], by name."""
    convert: Callable[[dict[str, mx.array]], dict[str, mx.array]] | None
    """From one expert's arrays as they are in the files; None where these are the same bytes."""


def _form_of(stored: StoredExperts, projection: str, linear: Any) -> _Form:
    parts = {part.name: part for part in stored.parts if part.projection == projection}
    targets = _arrays_of(linear, "bias" in parts)
    here = {name: (array.dtype, array.shape[1:]) for name, array in targets.items()}
    quantised = stored.quantised.get(projection)
    if isinstance(linear, PackedSwitchLinear):
        assert quantised is not None
        return _Form(targets, partial(_packed, quantised["group_size"], quantised["bits"]))
    if here == {name: (part.dtype, part.shape) for name, part in parts.items()}:
        return _Form(targets, None)
    if quantised is not None and "scales" not in targets:
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
