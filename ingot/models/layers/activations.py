"""GELU on CPUs as one native operation, where MLX's exponential takes longer than the products on both sides of it."""

from __future__ import annotations

from typing import Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.kernels import native
from ingot.models.layers.modules import adopt

_KINDS: Final = {"none": "gelu", "precise": "gelu_tanh", "tanh": "gelu_tanh"}
_FAST: Final = 1.702


class NativeGELU(nn.GELU):
    """Computes what MLX's computes, float32 natively."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            plain: mx.array = super().__call__(x)
            return plain
        if self._approx == "fast":
            return native.gated("sigmoid", _FAST * x, x)
        return native.gated(_KINDS[self._approx], x, mx.ones_like(x))


def swap_gelus(model: nn.Module) -> int:
    """Swap every GELU of a model for a native one; returns how many were swapped. Only where they are available."""
    found = [(path, module) for path, module in model.named_modules() if type(module) is nn.GELU]
    model.update_modules(tree_unflatten([(path, adopt(module, NativeGELU)) for path, module in found]))
    return len(found)
