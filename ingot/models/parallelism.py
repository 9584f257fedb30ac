"""Tensor and pipeline parallelism: how a model is split over several ranks, each of which loads and computes its share
alone.

*Tensor*: each rank has a part of every layer, some heads and some columns, and all add up what they found, twice a
layer. *Pipeline*: each rank has some of the layers and hands on what they give. mlx-lm's classes say how; what a class
does not say is refused with ModelError.

A linear layer that is sharded by its outputs is a linear layer like any other, only smaller, and becomes one here, so
that whatever multiplies plain layers fast does so with these, too. One that is sharded by its inputs gives a part of
each sum, and the parts of all ranks are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.errors import ModelError
from ingot.models.families.registry import recurrence_spec_of
from ingot.upstream import QuantizedSwitchLinear

ParallelMode = Literal["tensor", "pipeline"]
QUANTIZED_LINEARS: Final = (nn.QuantizedLinear, QuantizedSwitchLinear)


@dataclass(frozen=True, slots=True)
class ModelSharding:
    way: ParallelMode
    group: Any  # of mlx's: who else has a share

    @property
    def ranks(self) -> int:
        return int(self.group.size())

    @property
    def part(self) -> str:
        """Which of all states are this rank's, in words."""
        return f"{self.way}, rank {self.group.rank()} of {self.ranks}"


def shard_model(model: Any, config: dict[str, Any], sharing: ModelSharding) -> None:
    """Leave this rank's share of a model whose weights are not read yet. Raises ModelError where it cannot be dealt
    out so."""
    possible = parallel_modes(model)
    if sharing.way not in possible:
        others = f"It can be: {', '.join(possible)}." if possible else "It runs on one rank."
        raise ModelError(
            f"Models of type {config.get('model_type')} cannot be dealt out to ranks as {sharing.way}. {others}"
        )
    try:
        if sharing.way == "tensor":
            _shard_tensors(model, {**config, **(config.get("text_config") or {})}, sharing)
        else:
            model.model.pipeline(sharing.group)
    # The code of two dozen families divides by the number of ranks, and finds out in its own way that it cannot.
    except (ValueError, AssertionError, ZeroDivisionError, AttributeError) as error:
        reason = _uneven_groups(model, sharing.ranks) or error
        raise ModelError(f"The model cannot be dealt out to {sharing.ranks} ranks: {reason}") from error


def parallel_modes(model: Any) -> tuple[ParallelMode, ...]:
    """Those that the model's class knows."""
    found: list[ParallelMode] = []
    if hasattr(model, "shard"):
        found.append("tensor")
    if hasattr(getattr(model, "model", None), "pipeline"):
        found.append("pipeline")
    return tuple(found)


def _uneven_groups(model: Any, ranks: int) -> str | None:
    """What is wrong with packed weights that could not be cut: a rank has whole groups of their columns. They are cut
    in the order in which modules were made, so that the first of those that are still whole is the one."""
    for path, module in reversed(model.named_modules()):
        groups = module.scales.shape[-1] if type(module) in QUANTIZED_LINEARS else 0
        if groups % ranks:
            return (
                f"the {groups} groups of {module.group_size} packed columns of {path} do not come out even. Take "
                "another number of ranks, or a pipeline."
            )
    return None


def _shard_tensors(model: Any, config: dict[str, Any], sharing: ModelSharding) -> None:
    heads = int(config.get("num_attention_heads") or 0)
    if heads % sharing.ranks:
        raise ModelError(f"The model's {heads} heads of attention cannot be dealt out to {sharing.ranks} ranks evenly.")
    model.shard(sharing.group)
    swap_sharded_layers(model)
    for _, module in model.named_modules():
        for name in ("n_kv_heads", "num_key_value_heads"):
            if getattr(module, name, 1) == 0:
                shared = config.get("num_key_value_heads")
                raise ModelError(f"The model's {shared} heads of keys cannot be dealt out to {sharing.ranks} ranks.")


_QUANTIZATION_ATTRIBUTES = ("group_size", "bits", "mode")
_PLAIN: dict[type, type] = {
    nn.AllToShardedLinear: nn.Linear,
    nn.ShardedToAllLinear: nn.Linear,
    nn.QuantizedAllToShardedLinear: nn.QuantizedLinear,
    nn.QuantizedShardedToAllLinear: nn.QuantizedLinear,
}
_INPUT_SHARDED = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)


class AllReduceLinear(nn.Module):
    """The sum of what a linear layer gives on all ranks of a group."""

    def __init__(self, linear: nn.Module, bias: mx.array | None, group: Any) -> None:
        super().__init__()
        self.linear, self._group = linear, group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self.linear(x), group=self._group)
        return y + self.bias if "bias" in self else y


def swap_sharded_layers(model: nn.Module) -> int:
    """Swap the sharded layers that MLX makes for these; returns how many were."""
    swapped = [(path, _plain_layer(module)) for path, module in model.named_modules() if type(module) in _PLAIN]
    model.update_modules(tree_unflatten(swapped))
    for _, module in model.named_modules():
        _all_reduce_after(module)
    return len(swapped)


def _plain_layer(module: Any) -> nn.Module:
    sums = type(module) in _INPUT_SHARDED
    plain: Any = _PLAIN[type(module)]
    linear = plain.__new__(plain)
    nn.Module.__init__(linear)
    for name, value in module.items():
        if not (sums and name == "bias"):
            linear[name] = value
    for name in _QUANTIZATION_ATTRIBUTES:
        if hasattr(module, name):
            setattr(linear, name, getattr(module, name))
    return AllReduceLinear(linear, module.get("bias"), module.group) if sums else linear


def _all_reduce_after(mixer: Any) -> None:
    """Recurrent mixers add up by themselves, behind their last projection; what stands in for them does not, and need
    not if the projection does."""
    if recurrence_spec_of(mixer) is not None and getattr(mixer, "sharding_group", None) is not None:
        mixer.out_proj = AllReduceLinear(mixer.out_proj, None, mixer.sharding_group)
        mixer.sharding_group = None
