"""Replaces the experts of a model by slots, after its modules were made and before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from ingot.errors import ConfigError, ModelError
from ingot.kernels.device import Device, available_memory
from ingot.kernels.gpu.device_copies import find_device_copies
from ingot.models.checkpoint import pause_loading
from ingot.models.experts.files import READERS, ExpertFiles, ReadBytes, WeightsUnreadable, read_bytes
from ingot.models.experts.guessing import RouterGuess
from ingot.models.experts.kept import KEPT
from ingot.models.experts.locating import ExpertLocator
from ingot.models.experts.slots import ExpertSlots
from ingot.models.experts.streaming import ExpertStore, LayerExperts, StreamedExperts
from ingot.models.experts.weights import PARTS, TINY, Bytes, StoredExperts, StoredPart, projections_of
from ingot.models.families.registry import moe_spec_of
from ingot.models.layers.attention_setup import layer_numbers
from ingot.models.layers.layer_program import decoder_layers_of, layer_program_of
from ingot.models.layers.mlp import EXPERT_PROJECTIONS
from ingot.models.precision import settled_bytes
from ingot.quantities import format_bytes
from ingot.upstream import QuantizedSwitchLinear, SwitchGLU, SwitchMLP

SETTING: Final = "expert_memory"


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """How experts that do not fit in memory are kept. `slot_bytes` is called with the bytes of all other weights and
    those of all experts, and says how many slots may have. Without `read_ahead` experts are read when they are needed
    and not before, one after another; with `always` they have slots even if all of them fit; `past_cache` says whether
    reads pass the system's page cache by, instead of where the experts do not fit into it; and `read` stands in for the
    operating system's: these are for tests and benchmarks. `form` are the settings on which the numbers in slots
    depend."""

    slot_bytes: Callable[[int, int], int]
    read_ahead: bool = True
    always: bool = False
    past_cache: bool | None = None
    form: Hashable = None
    read: ReadBytes = read_bytes


EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a model's config names experts."""
    text = config.get("text_config") or {}
    return any(isinstance(part.get(key), int) and part[key] > 1 for part in (config, text) for key in EXPERT_COUNTS)


def stream_experts(
    model: nn.Module, folder: Path, stored: Mapping[str, mx.array], memory: ExpertMemory, device: Device
) -> ExpertStore | None:
    """Replace the experts of a model that nothing was read of. `stored` are its files' arrays as they were loaded, by
    name. Returns None where all of them fit. Raises ConfigError or ModelError that says why they cannot be read one by
    one."""
    found = _expert_modules(model)
    if not found:
        raise ConfigError(f"{SETTING}: the model has no mixture of experts: leave it out", param=SETTING)
    files = ExpertFiles(folder, memory.read)
    try:
        return _streamed(model, found, ExpertLocator(stored, files), files, memory, device)
    except WeightsUnreadable as error:
        files.close()
        raise ModelError(error.message) from error
    except BaseException:
        files.close()
        raise


def find_experts(model: nn.Module, stored: Mapping[str, mx.array], files: ExpertFiles) -> list[StoredExperts]:
    """Where the experts of each layer lie. Raises ModelError where they cannot be read one by one."""
    locator = ExpertLocator(stored, files)
    return [_stored_experts(path, module, locator) for path, module in _expert_modules(model)]


def _expert_modules(model: nn.Module) -> list[tuple[str, Any]]:
    return sorted(
        ((path, module) for path, module in model.named_modules() if isinstance(module, SwitchGLU | SwitchMLP)),
        key=lambda each: layer_numbers(each[0]),
    )


def _streamed(
    model: nn.Module,
    found: Sequence[tuple[str, Any]],
    locator: ExpertLocator,
    files: ExpertFiles,
    memory: ExpertMemory,
    device: Device,
) -> ExpertStore | None:
    layers = [_stored_experts(path, module, locator) for path, module in found]
    sizes = [_slot_bytes(module, device) / each.count for (_, module), each in zip(found, layers, strict=True)]
    whole = sum(settled_bytes(module, device) for _, module in found)
    most = memory.slot_bytes(settled_bytes(model, device) - whole, whole)
    counts = _slot_counts([each.count for each in layers], sizes, most)
    if counts == [each.count for each in layers] and not memory.always:
        files.close()
        return None
    guesses = _router_guesses(model, [module for _, module in found])
    _refuse_too_few(min(counts), guesses, sum(sizes), most)
    form = (files.identity, tuple(counts), memory.form)
    kept = KEPT.take(form)
    filled = [] if kept is not None else _all_filled_slots(found, layers, counts, files, device)
    _choose_cache(files, memory, sum(each.count * each.bytes_of_one for each in layers))
    copies = find_device_copies(device)
    is_gpu = device.kind != "cpu"
    store = ExpertStore(files, form=form, copies=copies, launches_early=is_gpu)  # from here on nothing fails
    for number, (path, module) in enumerate(found):
        slots = filled[number] if kept is None else kept[number].slots
        layer = LayerExperts(store, layers[number], slots, guesses[number])
        store.layers.append(layer)
        if kept is not None:
            module = layer.resume(kept[number])
        model.update_modules(tree_unflatten([(path, StreamedExperts(module, layer))]))
    return store


def _all_filled_slots(
    found: Sequence[tuple[str, Any]],
    layers: Sequence[StoredExperts],
    counts: Sequence[int],
    files: ExpertFiles,
    device: Device,
) -> list[ExpertSlots]:
    with ThreadPoolExecutor(READERS) as threads:
        return [
            _filled_slots(projections_of(module), each, count, partial(_read_first, threads, files), device)
            for (_, module), each, count in zip(found, layers, counts, strict=True)
        ]


def _stored_experts(path: str, module: Any, locator: ExpertLocator) -> StoredExperts:
    parts, quantised, linears = [], {}, projections_of(module)
    if linears.keys() != PROJECTIONS & module.keys():
        raise _other_form(path)
    for projection, linear in linears.items():
        for name in PARTS:
            array = linear.get(name)
            if array is None:
                continue
            ranges = locator.find(path, projection, name, array)
            if ranges is None:
                raise _other_form(path)
            parts.append(StoredPart(projection, name, array.dtype, tuple(array.shape[1:]), ranges))
        if isinstance(linear, QuantizedSwitchLinear):
            quantised[projection] = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
    return StoredExperts(path, tuple(parts), quantised)


PROJECTIONS: Final = {*EXPERT_PROJECTIONS, "fc1", "fc2"}


def _other_form(path: str) -> ModelError:
    return ModelError(
        f"{SETTING}: the experts of {path} are stored in another form than the model computes with. Convert the model "
        "with `ingot convert --experts` first, and serve what that writes."
    )


def _slot_bytes(module: Any, device: Device) -> int:
    """What all experts of a layer would take as slots. Native kernels keep their scales as float32."""
    widened = [
        linear[name].nbytes
        for linear in projections_of(module).values()
        for name in ("scales", "biases")
        if _is_widened(linear, device) and name in linear
    ]
    return settled_bytes(module, device) + sum(widened)


def _is_widened(linear: Any, device: Device) -> bool:
    affine = isinstance(linear, QuantizedSwitchLinear) and linear.mode == "affine"
    return device.kind == "cpu" and affine and linear.scales.dtype != mx.float16


FIRST_LAYER_SHARE: Final = 0.75
"""The first layer's experts, which no router guesses, are all in memory where that leaves the others this share of
their slots: they have more to read then, and wait for less of it."""


def _slot_counts(experts: Sequence[int], sizes: Sequence[float], most: int) -> list[int]:
    """Each layer's slots, which take at most so many bytes together. `sizes` are those of an expert."""
    even = _even_slots(experts, sizes, most)
    others = _even_slots(experts[1:], sizes[1:], int(most - experts[0] * sizes[0]))
    if others and others >= even * FIRST_LAYER_SHARE:
        return [experts[0], *(min(others, own) for own in experts[1:])]
    return [min(even, own) for own in experts]


def _even_slots(experts: Sequence[int], sizes: Sequence[float], most: int) -> int:
    """The most that every layer can have."""
    return max(
        (
            count
            for count in range(max(experts, default=0) + 1)
            if sum(min(count, own) * size for own, size in zip(experts, sizes, strict=True)) <= most
        ),
        default=0,
    )


def _refuse_too_few(count: int, guesses: Sequence[RouterGuess | None], size: float, most: int) -> None:
    """`size` is that of one expert of every layer."""
    least = max((guess.top for guess in guesses if guess is not None), default=1)
    if count < max(1, least):
        raise ConfigError(
            f"{SETTING}: {format_bytes(most)} is room for {count} of a layer's experts, and a token has {least}: "
            f"that takes {format_bytes(int(size * least))}",
            param=SETTING,
        )


def _filled_slots(
    linears: Mapping[str, Any],
    stored: StoredExperts,
    count: int,
    read: Callable[[StoredExperts, int], list[Bytes]],
    device: Device,
) -> ExpertSlots:
    """With the first experts, so that kernels are checked with numbers of the model's."""
    slots = ExpertSlots(stored.count, count)
    for part, held in zip(stored.parts, read(stored, count), strict=True):
        linear = linears[part.projection]
        array = part.array(held, count)
        if part.name == "scales" and _is_widened(linear, device):
            array[-1] = TINY
        linear[part.name] = array if device.kind != "cuda" else _written_by_device(array)
    mx.eval([linears[part.projection][part.name] for part in stored.parts])
    pause_loading()
    for expert in range(count - 1):  # the last one's slot may hold what is no expert
        slots.put(expert, expert)
    return slots


def _written_by_device(array: mx.array) -> mx.array:
    """The same bytes. On NVIDIA GPUs, what the host has written may be in memory that goes back and forth."""
    seen = array.view(mx.uint8)
    moved = (seen | mx.zeros(1, mx.uint8)).view(array.dtype)
    mx.eval(moved)  # while somebody holds the other, whose memory is not taken over
    return moved


def _read_first(threads: ThreadPoolExecutor, files: ExpertFiles, stored: StoredExperts, count: int) -> list[Bytes]:
    """The arrays of so many experts [count, bytes]."""
    held = [np.empty((count, part.size), np.uint8) for part in stored.parts]

    def read(expert: int) -> None:
        for run, numbers in stored.runs_of(expert):
            files.read(run, [held[number][expert].data for number in numbers])

    list(threads.map(read, range(count)))
    return held


def _choose_cache(files: ExpertFiles, memory: ExpertMemory, size: int) -> None:
    """Where all experts fit into what memory is left, the system's page cache is one more place to find them. Else it
    would only take memory and time."""
    if available_memory() < size if memory.past_cache is None else memory.past_cache:
        files.pass_cache()


def _router_guesses(model: nn.Module, experts: Sequence[nn.Module]) -> list[RouterGuess | None]:
    """For each layer's experts, how they are guessed; None where the model's family is not known here."""
    owners = {}
    for path, module in model.named_modules():
        spec = moe_spec_of(module)
        if spec is not None:
            owners[id(attrgetter(spec.experts)(module))] = (path, module, spec)
    norms = _norms_before(model)
    guesses: list[RouterGuess | None] = []
    before: mx.array | None = None
    for each in experts:
        found = owners.get(id(each))
        if found is None:
            guesses.append(None)
            before = None
            continue
        path, module, spec = found
        own = norms.get(id(module))
        scale = None if own is None or before is None else own / mx.where(before == 0, 1, before)
        guesses.append(RouterGuess(model, path, spec, int(attrgetter(spec.top)(module)), scale))
        before = own
    return guesses


def _norms_before(model: nn.Module) -> dict[int, mx.array]:
    """The weights of the norm before each part of a layer."""
    programs = [layer_program_of(layer) for layer in decoder_layers_of(model)]
    blocks = [block for program in programs if program is not None for block in program.blocks]
    return {
        id(block.part): block.norm_before.weight
        for block in blocks
        if block.norm_before is not None and "weight" in block.norm_before
    }
