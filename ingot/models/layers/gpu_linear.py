"""Linear layers on GPUs: products that are joined, and our kernels for quantised and for 16-bit weights.

A launch costs more than a small product, so layers that see the same states are one (`Product`). Where our kernels were
found to be right, few rows are multiplied by them: quantised weights as they are packed, and plain ones so that the
bits of a row do not depend on how many rows there are. Many rows are multiplied by MLX, quantised ones after
dequantising.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels.dense_matmul.kernels import MOST_ROWS, DenseProduct, DenseWeights
from ingot.kernels.dense_matmul.selfcheck import CheckedDense
from ingot.kernels.packed_matmul.kernels import PackedFormat, PackedProduct, PackedWeights
from ingot.kernels.packed_matmul.selfcheck import CheckedPacked
from ingot.models.layers.modules import adopt_module
from ingot.models.lora.layers import LoraMatrixStack
from ingot.upstream import QuantizedSwitchLinear

_QUANTIZATION_ATTRIBUTES = ("group_size", "bits", "mode")


class JoinedLinear:
    """Linear layers whose outputs stand one behind another. The layers go on as before, with views of the joined
    weights, so that nothing is in memory twice. No module of the model's: it owns no weights of its own."""

    def __init__(self, layers: Sequence[Any], names: Sequence[str] = ()) -> None:
        """Layers that are alike, or one. They are joined now: so long both exist. `names` are what the module that has
        them calls them."""
        self.parts, self.names = tuple(layers), tuple(names)
        self.added: LoraMatrixStack | None = None
        """What adapters add, where some are for these layers."""
        self.linear: Any = layers[0] if len(layers) == 1 else _join_weights(layers)
        self._transposed = self.linear.weight.T if type(self.linear) is nn.Linear else None
        mx.eval(self._transposed)

    def take(self, linear: nn.Module) -> None:
        """Multiply by another layer of the same weights from now on."""
        self.linear, self._transposed = linear, None

    def __call__(self, x: mx.array) -> mx.array:
        """Of states [tokens, size]."""
        if self._transposed is None:
            y: mx.array = self.linear(x)
        else:
            bias = self.linear.get("bias")
            y = x @ self._transposed if bias is None else mx.addmm(bias, x, self._transposed)
        return y if self.added is None else self.added(x, y)


def _join_weights(layers: Sequence[Any]) -> Any:
    """One layer, of whose weights the others are given views."""
    joined = adopt_module(layers[0], type(layers[0]))
    for name in [name for name in layers[0] if isinstance(layers[0][name], mx.array)]:
        whole, begin = mx.concatenate([layer[name] for layer in layers]), 0
        mx.eval(whole)
        joined[name] = whole
        for layer in layers:
            end = begin + layer[name].shape[0]
            layer[name] = whole[begin:end]
            mx.eval(layer[name])
            begin = end
    return joined


def joined_linears_of(model: nn.Module) -> list[JoinedLinear]:
    """All that a model's modules have."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, JoinedLinear)]


def join_linears(*layers: nn.Module, names: Sequence[str] = ()) -> JoinedLinear | None:
    """None where they are not alike: of other kinds, or packed in other ways. `names`: see `JoinedLinear`."""
    kinds = {_linear_kind(layer) for layer in layers}
    return JoinedLinear(layers, names) if len(kinds) == 1 and None not in kinds else None


def _linear_kind(layer: nn.Module) -> tuple[object, ...] | None:
    if type(layer) not in (nn.Linear, nn.QuantizedLinear):
        return None
    arrays = tuple((name, array.dtype, array.shape[1:]) for name, array in layer.items() if isinstance(array, mx.array))
    return (type(layer), arrays, *(getattr(layer, name, None) for name in _QUANTIZATION_ATTRIBUTES))


FEW_ROWS = 64
"""Rows up to which weights are multiplied as they are packed."""


class QuantizedKernelLinear(nn.QuantizedLinear):
    """Multiplies few rows by a kernel of ours."""

    _product: PackedProduct
    _packed: PackedWeights
    _kernels: CheckedPacked

    def __call__(self, x: mx.array) -> mx.array:
        y = _multiply_quantized(self, x)
        if y is None:
            own: mx.array = super().__call__(x)
            return own
        return y + self.bias if "bias" in self else y


class QuantizedKernelEmbedding(nn.QuantizedEmbedding):
    """Looks rows up as it always did; as an output head it multiplies like a `QuantizedKernelLinear`."""

    _product: PackedProduct
    _packed: PackedWeights
    _kernels: CheckedPacked

    def as_linear(self, x: mx.array) -> mx.array:
        y = _multiply_quantized(self, x)
        if y is None:
            own: mx.array = super().as_linear(x)
            return own
        return y


class QuantizedKernelSwitchLinear(QuantizedSwitchLinear):
    """Experts: few products are one launch, each of a row with the expert that was chosen for it."""

    _product: PackedProduct
    _packed: PackedWeights

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weights = self._packed
        # Each row comes with its experts, or once for each of them.
        rowwise = x.shape[:-1] in ((*indices.shape, 1), (*indices.shape[:-1], 1, 1))
        if not rowwise or x.dtype != weights.scales.dtype or indices.size > FEW_ROWS:
            own: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
            return own
        chosen = indices.reshape(-1).view(mx.int32)
        y = self._product.gather(x.reshape(-1, weights.columns), weights, chosen)
        y = y.reshape(*indices.shape, 1, weights.outputs)
        return y + mx.expand_dims(self.bias[indices], -2) if "bias" in self else y


def _multiply_quantized(module: QuantizedKernelLinear | QuantizedKernelEmbedding, x: mx.array) -> mx.array | None:
    """None for what MLX multiplies as fast, and for activations in another format than the weights' scales."""
    weights, scratch = module._packed, module._kernels.scratch
    if x.dtype != weights.scales.dtype:
        return None
    rows = x.reshape(-1, weights.columns)
    if rows.shape[0] <= FEW_ROWS:
        y = module._product(rows, weights)
    elif scratch is not None and scratch.covers(weights):
        y = scratch.multiply(rows, weights)
    else:
        return None
    return y.reshape(*x.shape[:-1], weights.outputs)


QUANTIZED_KERNELS: dict[type, type] = {
    nn.QuantizedLinear: QuantizedKernelLinear,
    nn.QuantizedEmbedding: QuantizedKernelEmbedding,
    QuantizedSwitchLinear: QuantizedKernelSwitchLinear,
}


def swap_quantized_layers(model: nn.Module, kernels: CheckedPacked) -> int:
    """Swap packed layers for ones that multiply faster, where that is right; returns how many were swapped.
    Products that stand for several layers are swapped, and so are those layers, which launches of one kind multiply by:
    to MLX's own products nothing is left, as it takes half a minute to compile the first of them."""
    products = joined_linears_of(model)
    for product in products:
        product.linear = _swap_quantized_layer(product.linear, kernels) or product.linear
    found = [(path, _swap_quantized_layer(module, kernels)) for path, module in model.named_modules()]
    swapped = [(path, module) for path, module in found if module is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped) + sum(type(product.linear) is QuantizedKernelLinear for product in products)


def reserve_scratch(model: nn.Module, kernels: CheckedPacked) -> None:
    """Set memory aside for many rows of a model whose layers were swapped."""
    layers = [*(product.linear for product in joined_linears_of(model)), *model.modules()]
    kernels.reserve(layer._packed for layer in layers if isinstance(layer, QuantizedKernelLinear))


def _swap_quantized_layer(module: Any, kernels: CheckedPacked) -> Any:
    if type(module) not in QUANTIZED_KERNELS:
        return None
    packing = PackedFormat(module.bits, module.group_size, module.mode)
    if not kernels.supports(packing):
        return None
    weights = PackedWeights.of(packing, module.weight, module.scales, module.biases)
    product = kernels.of(weights)
    if product is None:
        return None
    taken = adopt_module(module, QUANTIZED_KERNELS[type(module)])
    taken._product, taken._packed, taken._kernels = product, weights, kernels
    return taken


class DenseKernelLinear(nn.Linear):
    """Multiplies few rows by a kernel of ours."""

    _product: DenseProduct

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_few_rows(x, self.weight):
            own: mx.array = super().__call__(x)
            return own
        return _multiply_dense(self._product, x, self.weight, self.get("bias"))


class DenseKernelEmbedding(nn.Embedding):
    """Looks rows up as it always did; as an output head it multiplies like a `DenseKernelLinear`."""

    _product: DenseProduct

    def as_linear(self, x: mx.array) -> mx.array:
        if not _is_few_rows(x, self.weight):
            own: mx.array = super().as_linear(x)
            return own
        return _multiply_dense(self._product, x, self.weight, None)


DENSE_KERNELS: dict[type, type] = {nn.Linear: DenseKernelLinear, nn.Embedding: DenseKernelEmbedding}


def _is_few_rows(x: mx.array, weight: mx.array) -> bool:
    return x.dtype == weight.dtype and 0 < x.size <= MOST_ROWS * weight.shape[1]


def _multiply_dense(product: DenseProduct, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    y = product(x.reshape(-1, weight.shape[1]), weight, bias=bias)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], weight.shape[0])


def swap_dense_layers(model: nn.Module, kernels: CheckedDense) -> int:
    """Swap plain layers for ones whose rows keep their bits, where that is right; returns how many were swapped.
    Where a product stands for layers, which nobody multiplies by any more, it is swapped instead."""
    products = joined_linears_of(model)
    stood_for = {id(part) for product in products for part in product.parts}
    alone = [(path, module) for path, module in model.named_modules() if id(module) not in stood_for]
    layers = [*(product.linear for product in products), *(module for _, module in alone)]
    kernels.meet(_dense_weights(layer) for layer in layers if type(layer) in DENSE_KERNELS)
    joined = 0
    for product in products:
        taken = _swap_dense_layer(product.linear, kernels)
        if taken is not None:
            product.take(taken)
            joined += 1
    found = [(path, _swap_dense_layer(module, kernels)) for path, module in alone]
    swapped = [(path, module) for path, module in found if module is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped) + joined


def _dense_weights(layer: nn.Module) -> DenseWeights:
    return DenseWeights(layer.weight, layer.get("bias"))


def _swap_dense_layer(module: Any, kernels: CheckedDense) -> Any:
    product = kernels.of(_dense_weights(module)) if type(module) in DENSE_KERNELS else None
    if product is None:
        return None
    taken = adopt_module(module, DENSE_KERNELS[type(module)])
    taken._product, taken.weight = product, mx.contiguous(module.weight)
    return taken
