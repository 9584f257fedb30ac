"""Packed layers on NVIDIA GPUs, where our kernels were found to be right: few rows are multiplied by those, many by
weights that are unpacked first."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels.packed.checked import CheckedPacked
from ingot.kernels.packed_matmul.kernels import PackedProduct, PackedWeights, Packing
from ingot.models.layers.modules import adopt
from ingot.models.layers.products import products_of
from ingot.upstream import QuantizedSwitchLinear

FEW = 64
"""Rows up to which weights are multiplied as they are packed."""


class KernelLinear(nn.QuantizedLinear):
    """Multiplies few rows by a kernel of ours."""

    _product: PackedProduct
    _packed: PackedWeights
    _kernels: CheckedPacked

    def __call__(self, x: mx.array) -> mx.array:
        y = _multiplied(self, x)
        if y is None:
            own: mx.array = super().__call__(x)
            return own
        return y + self.bias if "bias" in self else y


class KernelEmbedding(nn.QuantizedEmbedding):
    """Looks rows up as it always did; as an output head it multiplies like a `KernelLinear`."""

    _product: PackedProduct
    _packed: PackedWeights
    _kernels: CheckedPacked

    def as_linear(self, x: mx.array) -> mx.array:
        y = _multiplied(self, x)
        if y is None:
            own: mx.array = super().as_linear(x)
            return own
        return y


class KernelSwitchLinear(QuantizedSwitchLinear):
    """Experts: few products are one launch, each of a row with the expert that was chosen for it."""

    _product: PackedProduct
    _packed: PackedWeights

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weights = self._packed
        # Each row comes with its experts, or once for each of them.
        rowwise = x.shape[:-1] in ((*indices.shape, 1), (*indices.shape[:-1], 1, 1))
        if not rowwise or x.dtype != weights.scales.dtype or indices.size > FEW:
            own: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
            return own
        chosen = indices.reshape(-1).view(mx.int32)
        y = self._product.gather(x.reshape(-1, weights.columns), weights, chosen)
        y = y.reshape(*indices.shape, 1, weights.outputs)
        return y + mx.expand_dims(self.bias[indices], -2) if "bias" in self else y


def _multiplied(module: KernelLinear | KernelEmbedding, x: mx.array) -> mx.array | None:
    """None for what MLX multiplies as fast, and for activations in another format than the weights' scales."""
    weights, scratch = module._packed, module._kernels.scratch
    if x.dtype != weights.scales.dtype:
        return None
    rows = x.reshape(-1, weights.columns)
    if rows.shape[0] <= FEW:
        y = module._product(rows, weights)
    elif scratch is not None and scratch.covers(weights):
        y = scratch.multiply(rows, weights)
    else:
        return None
    return y.reshape(*x.shape[:-1], weights.outputs)


KERNELS: dict[type, type] = {
    nn.QuantizedLinear: KernelLinear,
    nn.QuantizedEmbedding: KernelEmbedding,
    QuantizedSwitchLinear: KernelSwitchLinear,
}


def swap_packed(model: nn.Module, kernels: CheckedPacked) -> int:
    """Swap packed layers for ones that multiply faster, where that is right; returns how many were swapped.
    Products that stand for several layers are swapped, and so are those layers, which launches of one kind multiply by:
    to MLX's own products nothing is left, as it takes half a minute to compile the first of them."""
    products = products_of(model)
    for product in products:
        product.linear = _swapped(product.linear, kernels) or product.linear
    found = [(path, _swapped(module, kernels)) for path, module in model.named_modules()]
    swapped = [(path, module) for path, module in found if module is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped) + sum(type(product.linear) is KernelLinear for product in products)


def reserve_scratch(model: nn.Module, kernels: CheckedPacked) -> None:
    """Set memory aside for many rows of a model whose layers were swapped."""
    layers = [*(product.linear for product in products_of(model)), *model.modules()]
    kernels.reserve(layer._packed for layer in layers if isinstance(layer, KernelLinear))


def _swapped(module: Any, kernels: CheckedPacked) -> Any:
    if type(module) not in KERNELS:
        return None
    packing = Packing(module.bits, module.group_size, module.mode)
    if not kernels.supports(packing):
        return None
    weights = PackedWeights.of(packing, module.weight, module.scales, module.biases)
    product = kernels.of(weights)
    if product is None:
        return None
    taken = adopt(module, KERNELS[type(module)])
    taken._product, taken._packed, taken._kernels = product, weights, kernels
    return taken
