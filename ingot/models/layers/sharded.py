"""Linear layers of a model that several ranks share.

Each rank multiplies a part of the weights. What is sharded by its outputs is a linear layer like any other, only
smaller, and becomes one here, so that whatever multiplies plain layers fast does so with these, too. What is sharded by
its inputs gives a part of each sum, and the parts of all ranks are added up.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.models.families.registry import recurrence_of

_FORMAT = ("group_size", "bits", "mode")
_PLAIN: dict[type, type] = {
    nn.AllToShardedLinear: nn.Linear,
    nn.ShardedToAllLinear: nn.Linear,
    nn.QuantizedAllToShardedLinear: nn.QuantizedLinear,
    nn.QuantizedShardedToAllLinear: nn.QuantizedLinear,
}
_SUMMED = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)


class Summed(nn.Module):
    """The sum of what a linear layer gives on all ranks of a group."""

    def __init__(self, linear: nn.Module, bias: mx.array | None, group: Any) -> None:
        super().__init__()
        self.linear, self._group = linear, group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self.linear(x), group=self._group)
        return y + self.bias if "bias" in self else y


def swap_sharded(model: nn.Module) -> int:
    """Swap the sharded layers that MLX makes for these; returns how many were."""
    swapped = [(path, _swapped(module)) for path, module in model.named_modules() if type(module) in _PLAIN]
    model.update_modules(tree_unflatten(swapped))
    for _, module in model.named_modules():
        _sum_behind(module)
    return len(swapped)


def _swapped(module: Any) -> nn.Module:
    sums = type(module) in _SUMMED
    plain: Any = _PLAIN[type(module)]
    linear = plain.__new__(plain)
    nn.Module.__init__(linear)
    for name, value in module.items():
        if not (sums and name == "bias"):
            linear[name] = value
    for name in _FORMAT:
        if hasattr(module, name):
            setattr(linear, name, getattr(module, name))
    return Summed(linear, module.get("bias"), module.group) if sums else linear


def _sum_behind(mixer: Any) -> None:
    """Recurrent mixers add up by themselves, behind their last projection; what stands in for them does not, and need
    not if the projection does."""
    if recurrence_of(mixer) is not None and getattr(mixer, "sharding_group", None) is not None:
        mixer.out_proj = Summed(mixer.out_proj, None, mixer.sharding_group)
        mixer.sharding_group = None
