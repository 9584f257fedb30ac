"""Products with weights in as few operations as there can be, on GPUs, where a launch costs more than a small product:
layers that see the same states are one, and nothing is asked for but the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.models.layers.modules import adopt
from ingot.models.lora.layers import Sites

_FORMAT = ("group_size", "bits", "mode")


class Product:
    """Linear layers whose outputs stand one behind another. The layers go on as before, with views of the joined
    weights, so that nothing is in memory twice. No module of the model's: it owns no weights of its own."""

    def __init__(self, layers: Sequence[Any], names: Sequence[str] = ()) -> None:
        """Layers that are alike, or one. They are joined now: so long both exist. `names` are what the module that has
        them calls them."""
        self.parts, self.names = tuple(layers), tuple(names)
        self.added: Sites | None = None
        """What adapters add, where some are for these layers."""
        self.linear: Any = layers[0] if len(layers) == 1 else _joined(layers)
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


def _joined(layers: Sequence[Any]) -> Any:
    """One layer, of whose weights the others are given views."""
    joined = adopt(layers[0], type(layers[0]))
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


def products_of(model: nn.Module) -> list[Product]:
    """All that a model's modules have."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Product)]


def product_of(*layers: nn.Module, names: Sequence[str] = ()) -> Product | None:
    """None where they are not alike: of other kinds, or packed in other ways. `names`: see `Product`."""
    kinds = {_kind(layer) for layer in layers}
    return Product(layers, names) if len(kinds) == 1 and None not in kinds else None


def _kind(layer: nn.Module) -> tuple[object, ...] | None:
    if type(layer) not in (nn.Linear, nn.QuantizedLinear):
        return None
    arrays = tuple((name, array.dtype, array.shape[1:]) for name, array in layer.items() if isinstance(array, mx.array))
    return (type(layer), arrays, *(getattr(layer, name, None) for name in _FORMAT))
