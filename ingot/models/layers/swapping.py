"""Swaps the modules of a loaded model, or of a part of one, for the device that it runs on.

*Mixers* are the modules that let a token see others of its sequence, and so take a cache. Only they must understand
mixed batches; everything else in a model treats tokens one by one. Attention of known classes computes a mixed batch as
a whole, and so do recurrent mixers that a GPU has kernels for. Any other mixer runs its own code once for each
part of a mixed batch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels.checked import CheckedKernels
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.kernels.measured import NATIVE_ATTENTION, NATIVE_NORMS, NOTHING_SLOWER, SlowerParts
from ingot.models.families.registry import attention_spec_of, is_uncompiled, recurrence_spec_of
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.attention_backends import NativeRotations
from ingot.models.layers.attention_setup import is_known_here, mixed_attention_of
from ingot.models.layers.decode_graph import LayerInputsDecoder, capture_layers
from ingot.models.layers.decoder import MixedDecoder, swap_decoders
from ingot.models.layers.fused_layers import FusedLayers, LayerStandIn, fuse_layers
from ingot.models.layers.gpu_linear import swap_dense_layers, swap_quantized_layers
from ingot.models.layers.graph_parts import join_layer_products
from ingot.models.layers.latent_attention import find_head_products, unpack_head_linears
from ingot.models.layers.mlp import (
    GatedMLP,
    GroupedSwitchGLU,
    JoinedMLP,
    join_gated_mlps,
    swap_gated_mlps,
    swap_switch_mlps,
)
from ingot.models.layers.modules import UncompiledModule, extend, measured_part, own_class, restored_module
from ingot.models.layers.moe import JoinedMoe, find_moe_kernels, join_moes
from ingot.models.layers.norms import swap_norms
from ingot.models.layers.recurrent import KernelRecurrence, NativeRecurrence, kernel_recurrence, swap_recurrences
from ingot.models.layers.rope import KernelRopes, SharedRopes, swap_ropes
from ingot.models.layers.scans import ScanMixer, scan_mixer_of
from ingot.models.layers.split_mixer import SplitMixer

_INSIDE_LAYER = re.compile(r".*\.\d+\.[^\d]")
"""Paths below the number of a layer."""


def find_mixers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost modules inside the model's layers that take a cache, with their paths; of such that only hand it on
    to known attention, that attention. And those beside the layers that take one for themselves."""
    every = list(model.named_modules())
    takers = [(path, module) for path, module in every if _is_known_mixer(module) or _takes_cache(module)]
    inside = {path for path, _ in every if _INSIDE_LAYER.match(path)}
    around = {outer for path in inside for outer in ("", *_outer_paths(path))}
    takers = [(path, module) for path, module in takers if path not in around or path in inside]
    handing_on = {outer for path, module in takers if _is_known_mixer(module) for outer in _outer_paths(path)}
    paths = {path for path, _ in takers} - handing_on
    return [
        (path, module)
        for path, module in takers
        if path in paths and not any(outer in paths for outer in _outer_paths(path))
    ]


def _is_known_mixer(module: nn.Module) -> bool:
    return isinstance(module, MixedAttention | SplitMixer | ScanMixer) or attention_spec_of(module) is not None


def _takes_cache(module: nn.Module) -> bool:
    return _class_takes_cache(type(module))


@cache
def _class_takes_cache(cls: type) -> bool:
    return "cache" in inspect.signature(cls.__call__).parameters


def _outer_paths(path: str) -> Iterable[str]:
    names = path.split(".")
    return (".".join(names[:length]) for length in range(1, len(names)))


def swap_mixers(
    model: nn.Module,
    *,
    unfused: bool,
    kernels: CheckedKernels | None = None,
    slower: SlowerParts = NOTHING_SLOWER,
) -> int:
    """Swap every mixer of the model for one that understands mixed batches; returns how many were swapped. Those that
    were measured to be `slower` than mlx-lm's own run these."""
    found, ropes = find_mixers(model), SharedRopes() if unfused else None
    ragged = NativeRotations() if unfused and native.available() else None
    if ragged is not None and slower.leave_out(NATIVE_ATTENTION):
        ragged = None
    kernel_ropes = None if kernels is None else KernelRopes(kernels)

    def replacement_for(module: nn.Module) -> nn.Module:
        if any(slower.leave_out(measured_part(kind, module)) for kind in ("attention", "recurrent mixer")):
            return extend(module, SplitMixer, "Split")
        attention = mixed_attention_of(module, ropes, ragged, kernels, kernel_ropes)
        if attention is not None:
            return attention
        recurrence = None if kernels is None else kernel_recurrence(module, kernels.recurrent)
        return recurrence or scan_mixer_of(module) or extend(module, SplitMixer, "Split")

    model.update_modules(tree_unflatten([(path, replacement_for(module)) for path, module in found]))
    return len(found)


def split_mixers(model: nn.Module) -> None:
    """Swap every mixer that is mlx-lm's for its own code, run once for each part of a mixed batch."""
    own = [(path, each) for path, each in find_mixers(model) if type(each) is own_class(each)]
    model.update_modules(tree_unflatten([(path, extend(each, SplitMixer, "Split")) for path, each in own]))


def unknown_mixers(model: nn.Module) -> list[str]:
    """The classes of attention that run mlx-lm's own code, of a model whose modules were swapped or will be."""
    split = [each for path, each in model.named_modules() if isinstance(each, SplitMixer) and _INSIDE_LAYER.match(path)]
    mixers = [each for path, each in find_mixers(model) if _INSIDE_LAYER.match(path)]
    left = [each for each in mixers if type(each) is own_class(each) and not is_known_here(each)]
    return sorted(
        {own_class(each).__name__ for each in (*split, *left) if recurrence_spec_of(restored_module(each)) is None}
    )


def is_tiled(model: nn.Module) -> bool:
    """Whether a swapped model never holds the scores of more than a tile of a mixed batch where it is not fused."""
    swapped = [module for _, module in model.named_modules() if isinstance(module, MixedAttention | SplitMixer)]
    return bool(swapped) and all(isinstance(module, MixedAttention) for module in swapped)


_WHOLE_LAYERS = (LayerStandIn, LayerInputsDecoder)
SWAPPED_PARTS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "layers": _WHOLE_LAYERS,
    "attention": (*_WHOLE_LAYERS, MixedAttention, MixedDecoder),
    "recurrent layers": (*_WHOLE_LAYERS, NativeRecurrence, KernelRecurrence, ScanMixer),
    "experts": (*_WHOLE_LAYERS, JoinedMoe, GroupedSwitchGLU),
    "MLPs": (*_WHOLE_LAYERS, GatedMLP, JoinedMLP),
}
"""Classes whose modules replace mlx-lm's and share their weights, by the part that goes without them. What runs whole
layers knows the modules in these."""
STAND_INS: tuple[type[nn.Module], ...] = (SplitMixer, *{kind for kinds in SWAPPED_PARTS.values() for kind in kinds})


def is_fused(model: nn.Module) -> bool:
    """Whether all layers of a swapped model are one operation."""
    return any(isinstance(module, FusedLayers) for module in model.modules())


def allow_separate_layers(model: nn.Module, device: Device) -> None:
    """Swap modules so that fused layers, if there are any, can also be computed one after another."""
    if is_fused(model) and not any(isinstance(module, MixedAttention) for module in model.modules()):
        swap_mixers(model, unfused=device.unfused_attention)
        swap_gated_mlps(model)


def restore_mlx_lm_modules(model: nn.Module, kinds: tuple[type[nn.Module], ...] = STAND_INS) -> Callable[[], None]:
    """Put mlx-lm's own modules back where there are some of these kinds, in batches of all kinds. Returns what undoes
    it."""
    ours = [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]
    for path, module in ours:  # from the outermost inwards: those inside are looked up in what was put back
        model.update_modules(tree_unflatten([(path, restored_module(module))]))
    split_mixers(model)

    def undo() -> None:
        for path, module in ours:
            model.update_modules(tree_unflatten([(path, module)]))

    return undo


def restore_wrong_part(model: nn.Module, device: Device, is_right: Callable[[], bool]) -> str | None:
    """Put mlx-lm's own modules back for the first part without whose modules of ours a swapped model is right. Returns
    that part, or None if all parts were put back."""
    for part, kinds in SWAPPED_PARTS.items():
        if part == "layers":
            allow_separate_layers(model, device)
        if any(isinstance(module, kinds) for module in model.modules()):
            undo = restore_mlx_lm_modules(model, kinds)
            if is_right():
                return part
            undo()
    restore_mlx_lm_modules(model)
    return None


def run_uncompiled(model: nn.Module) -> None:
    """Swap those mixers that run a library's own code and go wrong where MLX compiles it."""
    split = [(path, module) for path, module in model.named_modules() if isinstance(module, SplitMixer)]
    found = [(path, module) for path, module in split if is_uncompiled(restored_module(module))]
    model.update_modules(tree_unflatten([(path, extend(each, UncompiledModule, "Uncompiled")) for path, each in found]))


def swap_modules(
    model: nn.Module,
    device: Device,
    kernels: CheckedKernels | None,
    *,
    apart: bool = False,
    axes: Sequence[int] | None = None,
    slower: SlowerParts = NOTHING_SLOWER,
) -> None:
    """Swap the modules that ingot computes otherwise than mlx-lm does. Layers become one operation where that is
    possible, unless they are to stay `apart`. `axes`: see `positioned_rope`. What was measured to be `slower` than
    MLX's own on this device is left out."""
    swap_ropes(model, axes)
    swap_decoders(model)
    if device.kind != "cpu":
        swap_mixers(model, unfused=device.unfused_attention, kernels=kernels, slower=slower)
        join_gated_mlps(model, slower)
        if device.kind == "cuda":
            join_moes(model)
            unpack_head_linears(model)
        join_layer_products(model)
        if kernels is not None:
            swap_quantized_layers(model, kernels.packed)
            swap_switch_mlps(model, kernels.experts)
            swap_dense_layers(model, kernels.dense)
            find_moe_kernels(model, kernels)
            find_head_products(model, kernels.packed)
        if device.kind == "cuda" and not apart:
            capture_layers(model, device)
        return
    fused = not apart and fuse_layers(model)
    swap_recurrences(model, slower)
    if not fused:
        swap_mixers(model, unfused=device.unfused_attention, kernels=kernels, slower=slower)
        swap_gated_mlps(model, slower=slower)
    if native.available() and not slower.leave_out(NATIVE_NORMS):
        swap_norms(model)
