"""How a model is dealt out to several ranks, each of which loads and computes its share alone.

*Tensor*: each rank has a part of every layer, some heads and some columns, and all add up what they found, twice a
layer. *Pipeline*: each rank has some of the layers, and hands on what they give. mlx-lm's classes say how; what a class
does not say is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.layers.sharded import swap_sharded
from ingot.upstream import QuantizedSwitchLinear

Way = Literal["tensor", "pipeline"]
PACKED: Final = (nn.QuantizedLinear, QuantizedSwitchLinear)


@dataclass(frozen=True, slots=True)
class Sharing:
    way: Way
    group: Any  # of mlx's: who else has a share

    @property
    def ranks(self) -> int:
        return int(self.group.size())

    @property
    def part(self) -> str:
        """Which of all states are this rank's, in words."""
        return f"{self.way}, rank {self.group.rank()} of {self.ranks}"


def share(model: Any, config: dict[str, Any], sharing: Sharing) -> None:
    """Leave this rank's share of a model whose weights are not read yet. Raises ModelError where it cannot be dealt
    out so."""
    possible = ways(model)
    if sharing.way not in possible:
        others = f"It can be: {', '.join(possible)}." if possible else "It runs on one rank."
        raise ModelError(
            f"Models of type {config.get('model_type')} cannot be dealt out to ranks as {sharing.way}. {others}"
        )
    try:
        if sharing.way == "tensor":
            _share_tensors(model, {**config, **(config.get("text_config") or {})}, sharing)
        else:
            model.model.pipeline(sharing.group)
    # The code of two dozen families divides by the number of ranks, and finds out in its own way that it cannot.
    except (ValueError, AssertionError, ZeroDivisionError, AttributeError) as error:
        reason = _uneven_groups(model, sharing.ranks) or error
        raise ModelError(f"The model cannot be dealt out to {sharing.ranks} ranks: {reason}") from error


def ways(model: Any) -> tuple[Way, ...]:
    """Those that the model's class knows."""
    found: list[Way] = []
    if hasattr(model, "shard"):
        found.append("tensor")
    if hasattr(getattr(model, "model", None), "pipeline"):
        found.append("pipeline")
    return tuple(found)


def _uneven_groups(model: Any, ranks: int) -> str | None:
    """What is wrong with packed weights that could not be cut: a rank has whole groups of their columns. They are cut
    in the order in which modules were made, so that the first of those that are still whole is the one."""
    for path, module in reversed(model.named_modules()):
        groups = module.scales.shape[-1] if type(module) in PACKED else 0
        if groups % ranks:
            return (
                f"the {groups} groups of {module.group_size} packed columns of {path} do not come out even. Take "
                "another number of ranks, or a pipeline."
            )
    return None


def _share_tensors(model: Any, config: dict[str, Any], sharing: Sharing) -> None:
    heads = int(config.get("num_attention_heads") or 0)
    if heads % sharing.ranks:
        raise ModelError(f"The model's {heads} heads of attention cannot be dealt out to {sharing.ranks} ranks evenly.")
    model.shard(sharing.group)
    swap_sharded(model)
    for _, module in model.named_modules():
        for name in ("n_kv_heads", "num_key_value_heads"):
            if getattr(module, name, 1) == 0:
                shared = config.get("num_key_value_heads")
                raise ModelError(f"The model's {shared} heads of keys cannot be dealt out to {sharing.ranks} ranks.")
