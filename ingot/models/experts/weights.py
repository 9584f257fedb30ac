"""From the bytes of an expert in a file to the arrays that products read: one slot of each.

Where the products take the numbers of the files as they are, and memory begins where the file's pages do or reads need
not care, an expert is read into its slots' own memory. Otherwise it is read beside them, and the thread that read it
brings it to the slots' form: in the native kernels' order, or in another number format. What only MLX can bring there,
the engine thread does.
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
from ingot.kernels.gpu.device_copies import DeviceCopies
from ingot.models.experts.files import ExpertFiles, ExpertRead, FileRange, SpareMemory, SparePiece, padded
from ingot.models.files.drive_speed import ALIGNED
from ingot.models.layers.mlp import DenseSwitchLinear, PackedSwitchLinear
from ingot.upstream import QuantizedSwitchLinear, SwitchLinear

TINY: Final = 1e-30
"""A scale that no 16 bits hold: with it among them, the native kernels keep all scales as float32, as an expert that
comes later may need."""
PARTS: Final = ("weight", "scales", "biases", "bias", "global_scale")
"""The arrays that a projection may have."""
PACKED: Final = ("weight", "scales", "biases")
"""Those of quantised weights."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Runs = list[tuple[FileRange, list[int]]]
"""What lies side by side in a file, with the numbers of the parts that are there."""


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

    @property
    def most_spare(self) -> int:
        """Bytes that hold an expert wherever it lies."""
        return sum(padded(part.size) + ALIGNED for part in self.parts)

    def runs_of(self, expert: int) -> Runs:
        """Where an expert lies: what is side by side in a file, with the numbers of the parts that are there."""
        places = [part.ranges[expert] for part in self.parts]
        runs: Runs = []
        for number in sorted(range(len(places)), key=lambda number: (places[number].file, places[number].offset)):
            place = places[number]
            if runs and (runs[-1][0].file, runs[-1][0].end) == (place.file, place.offset):
                before, parts = runs[-1]
                runs[-1] = FileRange(before.file, before.offset, before.size + place.size), [*parts, number]
            else:
                runs.append((place, [number]))
        return runs


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


class InSlot:
    """An expert is read into its slot itself."""

    at_once: Final = True

    def __init__(self, parts: Sequence[Sequence[memoryview]]) -> None:
        """Of each span that is read, the memory of the arrays in it."""
        self._parts = parts

    def begin(self) -> Sequence[Sequence[memoryview]]:
        return self._parts

    def deliver(self) -> bool:
        return True

    def end(self) -> None:
        pass


class BesideSlot:
    """An expert is read into memory of its own first, and brought into its slot from there."""

    at_once: Final = False

    def __init__(self, weights: SlotWeights, expert: int, slot: int, runs: Runs, spans: Sequence[FileRange]) -> None:
        """`spans` are what is read for these runs."""
        self._weights, self._slot, self._spans = weights, slot, spans
        self._begins, begin = [], 0
        self._offsets = dict[int, int]()  # of each part
        for (_, numbers), span in zip(runs, spans, strict=True):
            self._begins.append(begin)
            for number in numbers:
                self._offsets[number] = begin + weights.stored.parts[number].ranges[expert].offset - span.offset
            begin += padded(span.size)
        self._held: SparePiece | None = None

    def begin(self) -> Sequence[Sequence[memoryview]]:
        self._held = self._weights.spare.take(self._weights.stored.most_spare)
        whole = self._held.memory
        return [[whole[begin : begin + span.size]] for begin, span in zip(self._begins, self._spans, strict=True)]

    def parts(self) -> list[Bytes]:
        """The arrays that were read."""
        assert self._held is not None
        whole = np.frombuffer(self._held.memory, np.uint8)
        sizes = [part.size for part in self._weights.stored.parts]
        return [whole[self._offsets[n] : self._offsets[n] + size] for n, size in enumerate(sizes)]

    def deliver(self) -> bool:
        assert self._held is not None
        given = [self._held.address + self._offsets[number] for number in range(len(self._offsets))]
        if self._weights.arrival is not None:
            self._weights.arrival.fill(given, self._slot)
        elif self._weights.copies is not None:
            self._weights.copies.copy(self._weights.copies_to(self._slot, given))
        elif self._weights.is_same:
            for number, own in enumerate(self.parts()):
                self._weights.memory(number, self._slot)[:] = own
        else:
            return False
        return True

    def end(self) -> None:
        if self._held is not None:
            self._weights.spare.give_back(self._held)
            self._held = None


class SlotWeights:
    """The arrays of a layer's slots, and how an expert gets into one of them. Only the engine thread may use it, while
    nothing that reads a slot is being evaluated."""

    def __init__(
        self,
        products: nn.Module,
        stored: StoredExperts,
        files: ExpertFiles,
        spare: SpareMemory,
        copies: DeviceCopies | None = None,
    ) -> None:
        """`spare` memory is shared by all layers; `copies` bring it to a device with memory of its own. Raises
        ModelError where experts cannot be brought into the form that products have them in."""
        self.stored, self.spare, self._files = stored, spare, files
        self._places: dict[int, tuple[Runs, list[FileRange]]] = {}  # of experts that were read before
        self._forms = {name: _form_of(stored, name, each) for name, each in projections_of(products).items()}
        self.is_same = all(form.convert is None for form in self._forms.values())
        """Products take the numbers as they are in the files."""
        self.copies = copies if self.is_same else None
        self._memory: dict[tuple[str, str], Bytes] = {}
        self._addresses: dict[tuple[str, str], tuple[int, int]] = {}  # and how far it is from slot to slot
        targets = {
            (projection, name): array
            for projection, form in self._forms.items()
            for name, array in form.targets.items()
        }
        if self.copies is None:
            self._memory = {key: memory_of(array) for key, array in targets.items()}
        else:
            mx.eval(list(targets.values()))
            addresses = self.copies.locate(list(targets.values()))
            self._addresses = {
                key: (address, array.nbytes // array.shape[0])
                for (key, array), address in zip(targets.items(), addresses, strict=True)
            }
        self.arrival = None if self.is_same else self._native_arrival()

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return sum(array.nbytes for form in self._forms.values() for array in form.targets.values())

    def move_to(self, files: ExpertFiles, spare: SpareMemory) -> None:
        """The same files, opened anew."""
        self._files, self.spare, self._places = files, spare, {}

    def memory(self, number: int, slot: int) -> Bytes:
        """Of a slot, the array that is that part of the files, where it is the same."""
        part = self.stored.parts[number]
        return self._memory[part.projection, part.name][slot]

    def copies_to(self, slot: int, given: Sequence[int]) -> list[tuple[int, int, int]]:
        """For `DeviceCopies`, of the arrays of an expert, which are at these addresses."""
        found = []
        for part, address in zip(self.stored.parts, given, strict=True):
            begin, stride = self._addresses[part.projection, part.name]
            found.append((begin + slot * stride, address, part.size))
        return found

    def read(self, expert: int, slot: int, *, ahead: bool) -> ExpertRead:
        """A read of an expert that is to go into a slot. Unless it was delivered there, `install` is to be called."""
        if expert not in self._places:
            found = self.stored.runs_of(expert)
            self._places[expert] = found, [self._files.span(run) for run, _ in found]
        runs, spans = self._places[expert]
        if self.is_same and self.copies is None:
            parts = [[self.memory(number, slot) for number in numbers] for _, numbers in runs]
            if not self._files.passes_cache or all(
                _is_aligned(run.offset, *(size for part in own for size in (part.size, part.ctypes.data)))
                for (run, _), own in zip(runs, parts, strict=True)
            ):
                return ExpertRead(spans, InSlot([[part.data for part in own] for own in parts]), ahead)
        return ExpertRead(spans, BesideSlot(self, expert, slot, runs, spans), ahead)

    def install(self, slot: int, held: BesideSlot) -> None:
        """Bring an expert that was read into its slot, by MLX."""
        read = dict(zip(((part.projection, part.name) for part in self.stored.parts), held.parts(), strict=True))
        for projection, form in self._forms.items():
            own = {
                part.name: part.array(read[projection, part.name], 1)
                for part in self.stored.parts
                if part.projection == projection
            }
            arrays = own if form.convert is None else form.convert(own)
            for name, target in form.targets.items():
                made = mx.contiguous(arrays[name].astype(target.dtype)).view(mx.uint8)
                mx.eval(made)
                self._memory[projection, name][slot][:] = np.asarray(made).reshape(-1)
        held.end()

    def _native_arrival(self) -> Any:
        """What brings an expert into its slot without MLX; None where nothing does."""
        arrival = native.expert_arrival()
        if arrival is None:
            return None
        numbers = {(part.projection, part.name): number for number, part in enumerate(self.stored.parts)}
        for projection, form in self._forms.items():
            plain = dict(form.targets)
            if form.packing is not None:
                if not native.arrives(**form.packing):
                    return None
                names = [name for name in PACKED if (projection, name) in numbers]
                weight, scales = (self.stored.parts[numbers[projection, name]] for name in PACKED[:2])
                arrival.add_packed(
                    rows=weight.shape[0],
                    columns=scales.shape[1] * form.packing["group_size"],
                    group=form.packing["group_size"],
                    bits=form.packing["bits"],
                    mxfp4=form.packing["mode"] == "mxfp4",
                    given=[numbers[projection, name] for name in names],
                    factors=native.number_format(scales.dtype),
                    to=[self._target(projection, name) for name in PACKED],
                    stored=native.number_format(plain["scales"].dtype),
                )
                plain = {name: target for name, target in plain.items() if name not in PACKED}
            for name, target in plain.items():
                part = self.stored.parts[numbers[projection, name]] if (projection, name) in numbers else None
                if part is None or not native.becomes(part.dtype, target.dtype) or part.shape != target.shape[1:]:
                    return None
                is_same = part.dtype == target.dtype
                arrival.add_plain(
                    count=part.size if is_same else target[0].size,
                    given=numbers[projection, name],
                    from_=native.number_format(None if is_same else part.dtype),
                    to=self._target(projection, name),
                    stored=native.number_format(None if is_same else target.dtype),
                )
        return arrival

    def _target(self, projection: str, name: str) -> tuple[int, int]:
        memory = self._memory[projection, name]
        return memory.ctypes.data, memory.strides[0]


def _is_aligned(*places: int) -> bool:
    return all(place % ALIGNED == 0 for place in places)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a projection's products have its weights."""

    targets: dict[str, mx.array]
    """[slots, ...], by name."""
    convert: Callable[[dict[str, mx.array]], dict[str, mx.array]] | None
    """From one expert's arrays as they are in the files; None where these are the same bytes."""
    packing: Mapping[str, Any] | None = None
    """Bits, group size and mode, where the native kernels have the weights in an order of their own."""


def _form_of(stored: StoredExperts, projection: str, linear: Any) -> _Form:
    parts = {part.name: part for part in stored.parts if part.projection == projection}
    targets = _arrays_of(linear, "bias" in parts)
    here = {name: (array.dtype, array.shape[1:]) for name, array in targets.items()}
    quantised = stored.quantised.get(projection)
    if isinstance(linear, PackedSwitchLinear):
        assert quantised is not None
        return _Form(targets, partial(_packed, quantised["group_size"], quantised["bits"]), quantised)
    if here == {name: (part.dtype, part.shape) for name, part in parts.items()}:
        return _Form(targets, None)
    if quantised is not None and "scales" not in targets:
        return _Form(targets, partial(_unpacked, quantised))
    if {name: shape for name, (_, shape) in here.items()} != {name: part.shape for name, part in parts.items()}:
        raise ModelError(f"Experts of {stored.path} cannot be read one by one: {projection} has another shape here")
    return _Form(targets, lambda own: own)  # the same numbers in other formats


_Arrays = dict[str, mx.array]


def _arrays_of(linear: Any, biased: bool) -> _Arrays:
    """What products read: that of native kernels may be a copy of the module's."""
    if not isinstance(linear, PackedSwitchLinear | DenseSwitchLinear):
        return {name: linear[name] for name in PARTS if linear.get(name) is not None}
    names = PACKED if isinstance(linear, PackedSwitchLinear) else PACKED[:1]
    return dict(zip((*names, *(["bias"] if biased else [])), linear.native.arrays, strict=True))


def _packed(group_size: int, bits: int, own: _Arrays) -> _Arrays:
    """In the native kernels' order."""
    biases, bias = own.get("biases"), own.get("bias")
    made = native.packed_weights(own["weight"], own["scales"], biases, bias, group_size, bits)
    return dict(zip((*PACKED, *([] if bias is None else ["bias"])), made.arrays, strict=True))


def _unpacked(quantised: Mapping[str, Any], own: _Arrays) -> _Arrays:
    packed = own["weight"], own["scales"], own.get("biases")
    return {**own, "weight": mx.dequantize(*packed, **quantised)}
