"""Tensor and pipeline parallelism: how a model is split over several ranks, each of which loads only its share.

*Tensor*: each rank has a part of every layer, some heads and some columns, and the ranks' results are added up twice a
layer. *Pipeline*: each rank has some of the layers and sends their output on. mlx-lm's classes implement both; a model
whose class does not is refused with ModelError.

A linear layer that is sharded by its outputs is a smaller linear layer, and becomes one here, so that our faster
replacements apply. One that is sharded by its inputs gives partial sums, which are added up over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.families.registry import recurrence_spec_of
from ingot.models.layers.modules import swap_each
from ingot.upstream import QuantizedSwitchLinear

ParallelMode = Literal["tensor", "pipeline"]
QUANTIZED_LINEARS: Final = (nn.QuantizedLinear, QuantizedSwitchLinear)


@dataclass(frozen=True, slots=True)
class ModelSharding:
    mode: ParallelMode
    group: Any  # of MLX: the ranks that share the model

    @property
    def ranks(self) -> int:
        return int(self.group.size())

    @property
    def part(self) -> str:
        """This rank's part of the model, in words."""
        return f"{self.mode}, rank {self.group.rank()} of {self.ranks}"


def shard_model(model: Any, config: dict[str, Any], sharing: ModelSharding) -> None:
    """Reduce a model with lazy weights to this rank's share. Raises ModelError where it cannot be split so."""
    possible = parallel_modes(model)
    if sharing.mode not in possible:
        others = f"It can be: {', '.join(possible)}." if possible else "It runs on one rank."
        raise ModelError(
            f"Models of type {config.get('model_type')} cannot be split over ranks as {sharing.mode}. {others}"
        )
    try:
        if sharing.mode == "tensor":
            _shard_tensors(model, {**config, **(config.get("text_config") or {})}, sharing)
        else:
            model.model.pipeline(sharing.group)
    # The code of two dozen families divides by the number of ranks, and fails in many ways where it cannot.
    except (ValueError, AssertionError, ZeroDivisionError, AttributeError) as error:
        reason = _uneven_groups(model, sharing.ranks) or error
        raise ModelError(f"The model cannot be split over {sharing.ranks} ranks: {reason}") from error


def parallel_modes(model: Any) -> tuple[ParallelMode, ...]:
    """Those that the model's class supports."""
    found: list[ParallelMode] = []
    if hasattr(model, "shard"):
        found.append("tensor")
    if hasattr(getattr(model, "model", None), "pipeline"):
        found.append("pipeline")
    return tuple(found)


def _uneven_groups(model: Any, ranks: int) -> str | None:
    """Why quantised weights could not be split: a rank has whole groups of their columns. Modules are split in the
    order in which they were made, so that the first one that is still whole is the cause."""
    for path, module in reversed(model.named_modules()):
        groups = module.scales.shape[-1] if type(module) in QUANTIZED_LINEARS else 0
        if groups % ranks:
            return (
                f"the {groups} groups of {module.group_size} quantised columns of {path} do not divide evenly. Use "
                "another number of ranks, or a pipeline."
            )
    return None


def _shard_tensors(model: Any, config: dict[str, Any], sharing: ModelSharding) -> None:
    heads = int(config.get("num_attention_heads") or 0)
    if heads % sharing.ranks:
        raise ModelError(f"The model's {heads} attention heads cannot be split over {sharing.ranks} ranks evenly.")
    model.shard(sharing.group)
    swap_sharded_layers(model)
    for _, module in model.named_modules():
        for name in ("n_kv_heads", "num_key_value_heads"):
            if getattr(module, name, 1) == 0:
                shared = config.get("num_key_value_heads")
                raise ModelError(f"The model's {shared} KV heads cannot be split over {sharing.ranks} ranks.")


_QUANTIZATION_ATTRIBUTES = ("group_size", "bits", "mode")
_PLAIN: dict[type, type] = {
    nn.AllToShardedLinear: nn.Linear,
    nn.ShardedToAllLinear: nn.Linear,
    nn.QuantizedAllToShardedLinear: nn.QuantizedLinear,
    nn.QuantizedShardedToAllLinear: nn.QuantizedLinear,
}
_INPUT_SHARDED = (nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear)


class AllReduceLinear(nn.Module):
    """The sum of a linear layer's outputs on all ranks of a group."""

    def __init__(self, linear: nn.Module, bias: mx.array | None, group: Any) -> None:
        super().__init__()
        self.linear, self._group = linear, group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(self.linear(x), group=self._group)
        return y + self.bias if "bias" in self else y


def swap_sharded_layers(model: nn.Module) -> int:
    """Swap MLX's sharded layers for plain ones and `AllReduceLinear`; returns how many were."""
    swapped = swap_each(model, lambda module: _plain_layer(module) if type(module) in _PLAIN else None)
    for _, module in model.named_modules():
        _all_reduce_after(module)
    return swapped


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
    """Recurrent mixers add up after their last projection; our replacements do not, and need not if the projection
    does."""
    if recurrence_spec_of(mixer) is not None and getattr(mixer, "sharding_group", None) is not None:
        mixer.out_proj = AllReduceLinear(mixer.out_proj, None, mixer.sharding_group)
        mixer.sharding_group = None
