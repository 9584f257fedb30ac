"""Packed layers on NVIDIA GPUs: few rows are multiplied by our kernels, where those were found to be right."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels.packed.checked import CheckedPacked
from ingot.kernels.packed.kernels import PackedProduct, PackedWeights, Packing
from ingot.models.layers.modules import adopt
from ingot.models.layers.products import Product
from ingot.upstream import QuantizedSwitchLinear

FEW = 64
"""Rows up to which a product takes as long as memory takes to give the weights, a few times over."""


class KernelLinear(nn.QuantizedLinear):
    """Multiplies few rows by a kernel of ours."""

    _product: PackedProduct
    _packed: PackedWeights

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
    """None where there are too many rows, or numbers that the weights' scales are not in."""
    weights = module._packed
    if x.dtype != weights.scales.dtype or x.size > FEW * weights.columns:
        return None
    y = module._product(x.reshape(-1, weights.columns), weights)
    return y.reshape(*x.shape[:-1], weights.outputs)


KERNELS: dict[type, type] = {
    nn.QuantizedLinear: KernelLinear,
    nn.QuantizedEmbedding: KernelEmbedding,
    QuantizedSwitchLinear: KernelSwitchLinear,
}


def swap_packed(model: nn.Module, kernels: CheckedPacked) -> int:
    """Swap packed layers for ones that multiply few rows faster, where that is right; returns how many were swapped.
    Where a product stands for layers, which nobody multiplies by any more, it is swapped instead."""
    products = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Product)]
    for product in products:
        product.linear = _swapped(product.linear, kernels) or product.linear
    stood_for = {id(part) for product in products for part in product.parts}
    alone = [(path, module) for path, module in model.named_modules() if id(module) not in stood_for]
    found = [(path, _swapped(module, kernels)) for path, module in alone]
    swapped = [(path, module) for path, module in found if module is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped) + sum(type(product.linear) is KernelLinear for product in products)


def _swapped(module: Any, kernels: CheckedPacked) -> nn.Module | None:
    if type(module) not in KERNELS:
        return None
    packing = Packing(module.bits, module.group_size, module.mode)
    if not kernels.supports(packing):
        return None
    weights = PackedWeights.of(packing, module.weight, module.scales, module.biases)
    product = kernels.of(weights)
    if product is None:
        return None
    taken: KernelLinear | KernelEmbedding | KernelSwitchLinear = adopt(module, KERNELS[type(module)])
    taken._product, taken._packed = product, weights
    return taken
