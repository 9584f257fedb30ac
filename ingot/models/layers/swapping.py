"""All that is swapped in a loaded model, or in a part of one, for the device that it runs on."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels import native
from ingot.kernels.checked import CheckedKernels
from ingot.kernels.device import Device
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.decode_graph import capture_layers
from ingot.models.layers.dense_linear import swap_dense
from ingot.models.layers.fused_layers import FusedLayers, OwnLayer, fuse_layers
from ingot.models.layers.gated_delta import KernelDelta
from ingot.models.layers.gpu_linear import swap_packed
from ingot.models.layers.mixers import SplitMixer, split_mixers, swap_mixers
from ingot.models.layers.mlp import GatedMLP, JoinedMLP, join_gates, swap_gates
from ingot.models.layers.modules import restored, swap_ropes
from ingot.models.layers.norms import swap_norms
from ingot.models.layers.recurrent import NativeMixer, swap_recurrences

LOWERED = (OwnLayer, MixedAttention, SplitMixer, NativeMixer, KernelDelta, GatedMLP, JoinedMLP)
"""What stands in for modules of mlx-lm's whose weights it shares."""


def let_apart(model: nn.Module, device: Device) -> None:
    """Let layers that became one operation, if they did, be computed one after another as well, by modules of ours."""
    kinds = {FusedLayers, MixedAttention}
    found = {kind for module in model.modules() for kind in kinds if isinstance(module, kind)}
    if found == {FusedLayers}:
        swap_mixers(model, unfused=device.unfused_attention)
        swap_gates(model)


def unlower(model: nn.Module) -> None:
    """Let mlx-lm's own modules compute layers, mixers and MLPs again, in launches of all kinds."""
    found = [(path, restored(module)) for path, module in model.named_modules() if isinstance(module, LOWERED)]
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
        join_gates(model)
        if kernels is not None:
            swap_packed(model, kernels.packed)
            swap_dense(model, kernels.dense)
        if device.kind == "cuda" and not apart:
            capture_layers(model, device)
        return False
    fused = not apart and fuse_layers(model)
    swap_recurrences(model)
    if not fused:
        swap_mixers(model, unfused=device.unfused_attention, kernels=kernels)
        swap_gates(model)
    if native.available():
        swap_norms(model)
    return fused
