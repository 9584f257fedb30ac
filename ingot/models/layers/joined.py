"""Several products with weights of the same states as one, on GPUs, where a launch costs more than a small product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.models.layers.modules import adopt

_FORMAT = ("group_size", "bits", "mode")


class JoinedLinear:
    """Linear layers whose outputs stand one behind another. They go on as before, with views of the joined weights, so
    that nothing is in memory twice. No module of the model's: it owns no weights of its own."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """Layers that are `alike`."""
        self.parts = tuple(layers)
        joined: Any = adopt(layers[0], type(layers[0]))
        for name in [name for name in layers[0] if isinstance(layers[0][name], mx.array)]:
            whole = mx.concatenate([layer[name] for layer in layers])
            mx.eval(whole)
            joined[name] = whole
            begin = 0
            for layer in layers:
                layer[name] = whole[begin : begin + layer[name].shape[0]]
                begin += layer[name].shape[0]
                mx.eval(layer[name])
        self.linear: Any = joined

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        return y


def joined_linear(layers: Sequence[nn.Module]) -> JoinedLinear | None:
    """None where they are not alike: of other kinds, or packed in other ways."""
    return JoinedLinear(layers) if alike(layers) else None


def alike(layers: Sequence[nn.Module]) -> bool:
    kinds = {_kind(layer) for layer in layers}
    return len(kinds) == 1 and None not in kinds


def _kind(layer: nn.Module) -> tuple[object, ...] | None:
    if type(layer) not in (nn.Linear, nn.QuantizedLinear):
        return None
    arrays = tuple((name, array.dtype, array.shape[1:]) for name, array in layer.items() if isinstance(array, mx.array))
    return (type(layer), arrays, *(getattr(layer, name, None) for name in _FORMAT))
