"""Linear layers on GPUs: joined products, and our kernels for quantised and for 16-bit weights.

A kernel launch costs more than a small product, so layers with the same input are one (`JoinedLinear`). Where our
kernels were found to be correct, they multiply few rows: by quantised weights as they are packed, and by plain ones so
that the bits of a row do not depend on how many rows there are. Many rows are multiplied by MLX, after dequantising
where weights are quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels.dense_matmul.kernels import MOST_ROWS, CheckedDense, DenseProduct, DenseWeights
from ingot.kernels.packed_matmul.kernels import PackedFormat, PackedProduct, PackedWeights
from ingot.kernels.packed_matmul.selfcheck import CheckedPacked
from ingot.models.layers.modules import adopt_module, float_dtype, swap_each
from ingot.models.lora.layers import LoraMatrixStack
from ingot.upstream import QuantizedSwitchLinear

FEW_ROWS = 64
"""Rows up to which weights are multiplied as they are packed."""
_QUANTIZATION_ATTRIBUTES = ("group_size", "bits", "mode")


class JoinedLinear:
    """Linear layers whose outputs are concatenated. The layers work as before, with views of the joined weights, so
    that nothing is in memory twice. It is no module of the model's, as it owns no weights."""

    def __init__(self, layers: Sequence[Any], names: Sequence[str] = (), *, apart: bool = False) -> None:
        """Layers that are alike, or one. While they are joined, their weights exist twice. `names` are their attribute
        names in the module that has them. `apart`: where this product is not used, the layers are."""
        self.parts, self.names, self.apart = tuple(layers), tuple(names), apart
        self.added: LoraMatrixStack | None = None
        """What adapters add, where some are for these layers."""
        self.linear: Any = layers[0] if len(layers) == 1 else _join_weights(layers)
        self._transposed = self.linear.weight.T if type(self.linear) is nn.Linear else None
        mx.eval(self._transposed)

    def replace_linear(self, linear: nn.Module) -> None:
        """Multiply by another layer of the same weights from now on."""
        self.linear, self._transposed = linear, None

    @property
    def needs_rows(self) -> bool:
        """Whether it takes states [tokens, size] alone, or would make them of others: MLX's quantised products do
        not."""
        return self.added is not None or type(self.linear) is not nn.QuantizedLinear

    def __call__(self, x: mx.array) -> mx.array:
        """Of states [tokens, size]; of any others, unless it `needs_rows`."""
        if self._transposed is None:
            y: mx.array = self.linear(x)
        else:
            bias = self.linear.get("bias")
            y = x @ self._transposed if bias is None else mx.addmm(bias, x, self._transposed)
        return y if self.added is None else self.added(x, y)


def _join_weights(layers: Sequence[Any]) -> Any:
    """One layer, of whose weights the others get views."""
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
    """All that the modules of a model have."""
    return [product for module in model.modules() for product in joined_linears_in(module)]


def joined_linears_in(module: nn.Module) -> list[JoinedLinear]:
    """Those that a module itself has, also in tuples."""
    values = list(vars(module).values())
    for value in values:
        if isinstance(value, tuple):
            values += value
    return [value for value in values if isinstance(value, JoinedLinear)]


def join_linears(*layers: nn.Module, names: Sequence[str] = (), apart: bool = False) -> JoinedLinear | None:
    """None where they cannot be joined. `names`, `apart`: see `JoinedLinear`."""
    return JoinedLinear(layers, names, apart=apart) if can_join_linears(*layers) else None


def can_join_linears(*layers: nn.Module) -> bool:
    """Whether they are alike: of one kind, and quantised in one way."""
    kinds = {_linear_kind(layer) for layer in layers}
    return len(kinds) == 1 and None not in kinds


def _linear_kind(layer: nn.Module) -> tuple[object, ...] | None:
    if type(layer) not in (nn.Linear, nn.QuantizedLinear):
        return None
    arrays = tuple((name, array.dtype, array.shape[1:]) for name, array in layer.items() if isinstance(array, mx.array))
    return (type(layer), arrays, *(getattr(layer, name, None) for name in _QUANTIZATION_ATTRIBUTES))


class _KernelLinear:
    """Multiplies by a kernel of ours where `_multiply` does, else by MLX."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array | None = self._multiply(x)  # type: ignore[attr-defined]
        return super().__call__(x) if y is None else y  # type: ignore[misc]


class _KernelHead:
    """The same for an embedding as an output head."""

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array | None = self._multiply(x)  # type: ignore[attr-defined]
        return super().as_linear(x) if y is None else y  # type: ignore[misc]


class QuantizedKernel(nn.Module):
    _product: PackedProduct
    _packed: PackedWeights
    _kernels: CheckedPacked
    _every_row = False
    """Whether many rows, too, are multiplied so that their bits do not depend on how many there are."""

    def _multiply(self, x: mx.array) -> mx.array | None:
        """None for what MLX multiplies as fast, and for activations in another format than was expected."""
        weights, scratch = self._packed, self._kernels.scratch
        if x.dtype != weights.dtype:
            return None
        rows = x.reshape(-1, weights.columns)
        if rows.shape[0] <= FEW_ROWS or self._every_row:
            y = self._product(rows, weights)
        elif scratch is not None and scratch.covers(weights):
            y = scratch.multiply(rows, weights)
        else:
            return None
        y = y.reshape(*x.shape[:-1], weights.outputs)
        return y + self.bias if "bias" in self else y


class QuantizedKernelLinear(_KernelLinear, QuantizedKernel, nn.QuantizedLinear): ...


class QuantizedKernelEmbedding(_KernelHead, QuantizedKernel, nn.QuantizedEmbedding): ...


class QuantizedKernelSwitchLinear(QuantizedSwitchLinear):
    """Experts: few products are one kernel launch, each of a row with the expert that was chosen for it."""

    _product: PackedProduct
    _packed: PackedWeights

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weights = self._packed
        # Each row comes with its experts, or once for each of them.
        rowwise = x.shape[:-1] in ((*indices.shape, 1), (*indices.shape[:-1], 1, 1))
        if not rowwise or x.dtype != weights.dtype or indices.size > FEW_ROWS:
            own: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
            return own
        chosen = indices.reshape(-1).view(mx.int32)
        y = self._product.gather(x.reshape(-1, weights.columns), weights, chosen)
        y = y.reshape(*indices.shape, 1, weights.outputs)
        return y + mx.expand_dims(self.bias[indices], -2) if "bias" in self else y


QUANTIZED_KERNELS: dict[type, type] = {
    nn.QuantizedLinear: QuantizedKernelLinear,
    nn.QuantizedEmbedding: QuantizedKernelEmbedding,
    QuantizedSwitchLinear: QuantizedKernelSwitchLinear,
}


def swap_quantized_layers(model: nn.Module, kernels: CheckedPacked) -> int:
    """Swap quantised layers for ones that multiply faster, where that is correct; returns how many were swapped.
    Joined products are swapped, and so are their layers, which other batches multiply by: nothing is left to MLX's own
    products, as it takes half a minute to compile the first of them."""
    products, main = joined_linears_of(model), float_dtype(model)
    for product in products:
        product.linear = _quantized_kernel_layer(product.linear, kernels, main) or product.linear
    swapped = swap_each(model, lambda module: _quantized_kernel_layer(module, kernels, main))
    return swapped + sum(type(product.linear) is QuantizedKernelLinear for product in products)


def reserve_scratch(model: nn.Module, kernels: CheckedPacked) -> None:
    """Set memory aside for many rows of a model whose layers were swapped."""
    layers = [*(product.linear for product in joined_linears_of(model)), *model.modules()]
    kernels.reserve(layer._packed for layer in layers if isinstance(layer, QuantizedKernelLinear))


def _quantized_kernel_layer(module: Any, kernels: CheckedPacked, main: mx.Dtype) -> Any:
    """`main` is the activations' dtype where weights do not say it."""
    if type(module) not in QUANTIZED_KERNELS:
        return None
    packed_format = PackedFormat(module.bits, module.group_size, module.mode)
    if not kernels.supports(packed_format):
        return None
    weights = PackedWeights.of(packed_format, module.weight, module.scales, module.get("biases"), dtype=main)
    product = kernels.of(weights)
    if product is None:
        return None
    layer = adopt_module(module, QUANTIZED_KERNELS[type(module)])
    layer._product, layer._packed, layer._kernels = product, weights, kernels
    return layer


def multiply_every_row(model: nn.Module) -> str | None:
    """From now on layers that were swapped multiply many rows, too, by kernels, so that a row keeps its bits. Returns
    which layers do not keep them on this device; None where all do. One of each kind is tried."""
    tried = dict[object, str | None]()
    for layer in (*(product.linear for product in joined_linears_of(model)), *model.modules()):
        if isinstance(layer, QuantizedKernel | DenseKernel):
            layer._every_row = True
            kind = type(layer), layer.weight.shape, layer.weight.dtype, "bias" in layer
            if kind not in tried:
                tried[kind] = _lost_bits(layer)
    return next((lost for lost in tried.values() if lost is not None), None)


def _lost_bits(layer: QuantizedKernel | DenseKernel) -> str | None:
    """Whether a row's product depends on how many rows there are."""
    outputs = layer.weight.shape[0]
    if isinstance(layer, DenseKernel):
        columns, dtype = layer.weight.shape[1], layer.weight.dtype
    else:
        columns, dtype = layer._packed.columns, layer._packed.dtype
    x = mx.random.normal((2 * FEW_ROWS + 1, columns), key=mx.random.key(7)).astype(dtype)
    try:
        whole, part = layer._multiply(x), layer._multiply(x[-MOST_ROWS:])
        if whole is not None and part is not None and mx.array_equal(whole[-MOST_ROWS:], part):
            return None
    except (RuntimeError, ValueError) as error:
        return f"products of {outputs}x{columns}: {' '.join(str(error).split())[:300]}"
    return f"products of {outputs}x{columns}, which depend on how many rows there are"


class DenseKernel(nn.Module):
    _product: DenseProduct
    _every_row = False

    def _multiply(self, x: mx.array) -> mx.array | None:
        """None for many rows, and for activations in another format than the weights."""
        outputs, columns = self.weight.shape
        if x.dtype != self.weight.dtype or not x.size or (x.size > MOST_ROWS * columns and not self._every_row):
            return None
        y = self._product(x.reshape(-1, columns), self.weight, bias=self.get("bias"))
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], outputs)


class DenseKernelLinear(_KernelLinear, DenseKernel, nn.Linear): ...


class DenseKernelEmbedding(_KernelHead, DenseKernel, nn.Embedding): ...


DENSE_KERNELS: dict[type, type] = {nn.Linear: DenseKernelLinear, nn.Embedding: DenseKernelEmbedding}


def swap_dense_layers(model: nn.Module, kernels: CheckedDense) -> int:
    """Swap plain layers for ones whose rows keep their bits, where that is correct; returns how many were swapped.
    Joined products are swapped instead of their layers, where nothing multiplies by these any more."""
    products = joined_linears_of(model)
    joined = {id(part) for product in products if not product.apart for part in product.parts}
    alone = [module for _, module in model.named_modules() if id(module) not in joined]
    layers = [*(product.linear for product in products), *alone]
    kernels.meet(_dense_weights(layer) for layer in layers if type(layer) in DENSE_KERNELS)
    swapped = 0
    for product in products:
        layer = _dense_kernel_layer(product.linear, kernels)
        if layer is not None:
            product.replace_linear(layer)
            swapped += 1
    return swapped + swap_each(
        model, lambda module: None if id(module) in joined else _dense_kernel_layer(module, kernels)
    )


def _dense_weights(layer: nn.Module) -> DenseWeights:
    return DenseWeights(layer.weight, layer.get("bias"))


def _dense_kernel_layer(module: Any, kernels: CheckedDense) -> Any:
    product = kernels.of(_dense_weights(module)) if type(module) in DENSE_KERNELS else None
    if product is None:
        return None
    layer = adopt_module(module, DENSE_KERNELS[type(module)])
    layer._product, layer.weight = product, mx.contiguous(module.weight)
    return layer
