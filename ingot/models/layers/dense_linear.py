"""Plain layers of 16 bits on NVIDIA GPUs, where our kernels were found to be right: few rows are multiplied by those,
so that the bits of a row do not depend on how many there are; many by MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels.dense.checked import CheckedDense
from ingot.kernels.dense_matmul.kernels import MOST_ROWS, DenseProduct, DenseWeights
from ingot.models.layers.modules import adopt
from ingot.models.layers.products import products_of


class DenseKernelLinear(nn.Linear):
    """Multiplies few rows by a kernel of ours."""

    _product: DenseProduct

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_few(x, self.weight):
            own: mx.array = super().__call__(x)
            return own
        return _multiplied(self._product, x, self.weight, self.get("bias"))


class DenseKernelEmbedding(nn.Embedding):
    """Looks rows up as it always did; as an output head it multiplies like a `DenseKernelLinear`."""

    _product: DenseProduct

    def as_linear(self, x: mx.array) -> mx.array:
        if not _is_few(x, self.weight):
            own: mx.array = super().as_linear(x)
            return own
        return _multiplied(self._product, x, self.weight, None)


KERNELS: dict[type, type] = {nn.Linear: DenseKernelLinear, nn.Embedding: DenseKernelEmbedding}


def _is_few(x: mx.array, weight: mx.array) -> bool:
    return x.dtype == weight.dtype and 0 < x.size <= MOST_ROWS * weight.shape[1]


def _multiplied(product: DenseProduct, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    y = product(x.reshape(-1, weight.shape[1]), weight, bias=bias)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], weight.shape[0])


def swap_dense(model: nn.Module, kernels: CheckedDense) -> int:
    """Swap plain layers for ones whose rows keep their bits, where that is right; returns how many were swapped.
    Where a product stands for layers, which nobody multiplies by any more, it is swapped instead."""
    products = products_of(model)
    stood_for = {id(part) for product in products for part in product.parts}
    alone = [(path, module) for path, module in model.named_modules() if id(module) not in stood_for]
    layers = [*(product.linear for product in products), *(module for _, module in alone)]
    kernels.meet(_weights(layer) for layer in layers if type(layer) in KERNELS)
    joined = 0
    for product in products:
        taken = _swapped(product.linear, kernels)
        if taken is not None:
            product.take(taken)
            joined += 1
    found = [(path, _swapped(module, kernels)) for path, module in alone]
    swapped = [(path, module) for path, module in found if module is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped) + joined


def _weights(layer: nn.Module) -> DenseWeights:
    return DenseWeights(layer.weight, layer.get("bias"))


def _swapped(module: Any, kernels: CheckedDense) -> Any:
    product = kernels.of(_weights(module)) if type(module) in KERNELS else None
    if product is None:
        return None
    taken = adopt(module, KERNELS[type(module)])
    taken._product, taken.weight = product, mx.contiguous(module.weight)
    return taken
