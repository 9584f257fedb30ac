"""All that is swapped in a loaded model, or in a part of one, for the device that it runs on.

*Mixers* are the modules that let a token see others of its sequence, and so take a cache. They are what must know about
mixed batches; everything else in a model treats tokens one by one. Attention that we know computes them as a whole, and
so do gated delta nets where a GPU has kernels for them. Any other mixer is run once for each part of a mixed batch, by
its own code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.cache.forward_batch import MixedBatch, PerBatch, TokenPositions
from ingot.cache.layer_state import LayerState
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.models.families.registry import attention_spec_of, recurrence_spec_of
from ingot.models.layers.attention import MixedAttention, mixed_attention_of
from ingot.models.layers.attention_backends import NativeRotations
from ingot.models.layers.decode_graph import capture_layers
from ingot.models.layers.fused_layers import FusedLayers, LayerStandIn, fuse_layers
from ingot.models.layers.gpu_linear import swap_dense_layers, swap_quantized_layers
from ingot.models.layers.mlp import GatedMLP, JoinedMLP, join_gated_mlps, swap_gated_mlps
from ingot.models.layers.modules import extend, own_class, restored_module, swap_ropes
from ingot.models.layers.norms import swap_norms
from ingot.models.layers.recurrent import KernelGatedDelta, NativeRecurrence, kernel_gated_delta, swap_recurrences
from ingot.models.layers.rope import KernelRopes, SharedRopes
from ingot.models.lora.layers import LoraMapping

_NO_CONTEXT = nullcontext()


class SplitMixer(nn.Module):
    """Takes mixed launches apart and has the module that it extends compute each of their launches."""

    _lora_mapping: LoraMapping | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        values = (*given, *named.values())
        state = next((value for value in values if isinstance(value, LayerState)), None)
        mixed = _mixed_batch_of(state, values)
        if mixed is None:
            return super().__call__(*given, **named)
        outputs: list[Any] = []
        for number, part in enumerate(mixed.parts):
            before = outputs[-1:]
            own = [_part_of_argument(value, mixed, number, before) for value in given]
            options = {name: _part_of_argument(value, mixed, number, before) for name, value in named.items()}
            with nullcontext() if state is None else state.computing(part), self._adapted(*mixed.bounds[number]):
                outputs.append(super().__call__(*own, **options))
        return _join_outputs(mixed, outputs)

    def _adapted(self, begin: int, end: int) -> AbstractContextManager[None]:
        return _NO_CONTEXT if self._lora_mapping is None else self._lora_mapping.within(begin, end)


def _mixed_batch_of(state: LayerState | None, values: Iterable[Any]) -> MixedBatch | None:
    """The mixed launch that a mixer is called in; one that has no state of its own still knows it by its arguments."""
    if state is not None:
        return state.whole
    return next((value.mixed for value in values if isinstance(value, PerBatch)), None)


def _part_of_argument(value: Any, mixed: MixedBatch, number: int, before: list[Any]) -> Any:
    """What of an argument concerns one launch, once the launch before has given what it gives."""
    if isinstance(value, PerBatch):
        return value.parts[number]
    if isinstance(value, TokenPositions):
        return mixed.parts[number].offset
    if isinstance(value, mx.array) and value.shape[:2] == (1, mixed.tokens):
        taken = mixed.taken(number, value)
        # In order: states can only be written in place while nobody waits to read them.
        return mx.depends(taken, _first_output(before[0])) if before else taken
    return value


def _first_output(output: Any) -> mx.array:
    first: mx.array = output[0] if isinstance(output, tuple) else output
    return first


def _join_outputs(mixed: MixedBatch, outputs: list[Any]) -> Any:
    """The tokens' states as one row again; what else a mixer gives is for other mixers, which take it apart again."""
    joined = mixed.joined([_first_output(output) for output in outputs])
    if not isinstance(outputs[0], tuple):
        return joined
    return joined, *(PerBatch(mixed, parts) for parts in list(zip(*outputs, strict=True))[1:])


def find_mixers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost modules inside the model's layers that take a cache, with their paths."""
    takers = [
        (path, module) for path, module in model.named_modules() if _INSIDE_LAYER.match(path) and _takes_cache(module)
    ]
    paths = {path for path, _ in takers}
    return [(path, module) for path, module in takers if not any(outer in paths for outer in _outer_paths(path))]


_INSIDE_LAYER = re.compile(r".*\.\d+\.[^\d]")
"""Behind the number of a layer."""


def _takes_cache(module: nn.Module) -> bool:
    return "cache" in inspect.signature(type(module).__call__).parameters


def _outer_paths(path: str) -> Iterable[str]:
    names = path.split(".")
    return (".".join(names[:length]) for length in range(1, len(names)))


def swap_mixers(model: nn.Module, *, unfused: bool, kernels: CheckedKernels | None = None) -> int:
    """Swap every mixer of the model for one that understands mixed launches; returns how many were swapped."""
    found, ropes = find_mixers(model), SharedRopes() if unfused else None
    ragged = NativeRotations() if unfused and native.available() else None
    turns = None if kernels is None else KernelRopes(kernels)
    swapped = [(path, _swapped_mixer(module, ropes, ragged, kernels, turns)) for path, module in found]
    model.update_modules(tree_unflatten(swapped))
    return len(found)


def split_mixers(model: nn.Module) -> None:
    """Swap every mixer of the model for its own code, run once for each launch of a mixed one."""
    model.update_modules(
        tree_unflatten([(path, extend(each, SplitMixer, "Split")) for path, each in find_mixers(model)])
    )


def unknown_mixers(model: nn.Module) -> list[str]:
    """The classes of attention that run mlx-lm's own code, of a model whose modules were swapped or will be."""
    split = [module for module in model.modules() if isinstance(module, SplitMixer)]
    left = [each for _, each in find_mixers(model) if type(each) is own_class(each) and attention_spec_of(each) is None]
    return sorted(
        {own_class(each).__name__ for each in (*split, *left) if recurrence_spec_of(restored_module(each)) is None}
    )


def _swapped_mixer(
    module: nn.Module,
    ropes: SharedRopes | None,
    ragged: NativeRotations | None,
    kernels: CheckedKernels | None,
    turns: KernelRopes | None,
) -> nn.Module:
    attention = mixed_attention_of(module, ropes, ragged, kernels, turns)
    if attention is not None:
        return attention
    recurrence = None if kernels is None else kernel_gated_delta(module, kernels.delta)
    return extend(module, SplitMixer, "Split") if recurrence is None else recurrence


def is_tiled(model: nn.Module) -> bool:
    """Whether a swapped model's mixed launches never hold the scores of more than a tile where they are not fused."""
    swapped = [module for _, module in model.named_modules() if isinstance(module, MixedAttention | SplitMixer)]
    return bool(swapped) and all(isinstance(module, MixedAttention) for module in swapped)


STAND_INS = (LayerStandIn, MixedAttention, SplitMixer, NativeRecurrence, KernelGatedDelta, GatedMLP, JoinedMLP)
"""What stands in for modules of mlx-lm's whose weights it shares."""


def allow_separate_layers(model: nn.Module, device: Device) -> None:
    """Let layers that became one operation, if they did, be computed one after another as well, by modules of ours."""
    kinds = {FusedLayers, MixedAttention}
    found = {kind for module in model.modules() for kind in kinds if isinstance(module, kind)}
    if found == {FusedLayers}:
        swap_mixers(model, unfused=device.unfused_attention)
        swap_gated_mlps(model)


def restore_mlx_lm_modules(model: nn.Module) -> None:
    """Let mlx-lm's own modules compute layers, mixers and MLPs again, in launches of all kinds."""
    found = [(path, restored_module(module)) for path, module in model.named_modules() if isinstance(module, STAND_INS)]
    for path, module in found:  # from the outermost inwards: those inside are looked up in what was put back
        model.update_modules(tree_unflatten([(path, module)]))
    split_mixers(model)


def swap_modules(
    model: nn.Module,
    device: Device,
    kernels: CheckedKernels | None,
    *,
    apart: bool = False,
    axes: Sequence[int] | None = None,
) -> bool:
    """Swap the modules that we compute otherwise than mlx-lm. Whether all layers became one operation, which they do
    not where they are to stay `apart`. `axes`: see `positioned`."""
    swap_ropes(model, axes)
    if device.kind != "cpu":
        swap_mixers(model, unfused=device.unfused_attention, kernels=kernels)
        join_gated_mlps(model)
        if kernels is not None:
            swap_quantized_layers(model, kernels.packed)
            swap_dense_layers(model, kernels.dense)
        if device.kind == "cuda" and not apart:
            capture_layers(model, device)
        return False
    fused = not apart and fuse_layers(model)
    swap_recurrences(model)
    if not fused:
        swap_mixers(model, unfused=device.unfused_attention, kernels=kernels)
        swap_gated_mlps(model)
    if native.available():
        swap_norms(model)
    return fused
