"""A model's decoder layers as programs: which parts a layer has and how they are put together, read from the family's
description.

Whoever runs whole layers at once (`fused_layers`, `decode_graph`) lowers these programs part by part, and refuses those
with a part that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import mlx.nn as nn

from ingot.models.families.description import LayerSpec
from ingot.models.families.registry import layer_spec_of


@dataclass(frozen=True, slots=True, eq=False)
class LayerProgram:
    """`h = x + multiplier * norm_after_mixer(mixer(norm_before_mixer(x)))`, then the same with its MLP; norms that a
    family does not have are None."""

    mixer: Any
    is_recurrent: bool
    mlp: Any
    norm_before_mixer: nn.Module | None
    norm_after_mixer: nn.Module | None
    norm_before_mlp: nn.Module | None
    norm_after_mlp: nn.Module | None
    multiplier: float | None
    clipped: bool
    """Whether sums in float16 are kept finite."""

    @property
    def norms(self) -> tuple[nn.Module | None, ...]:
        """In the order in which they are computed."""
        return self.norm_before_mixer, self.norm_after_mixer, self.norm_before_mlp, self.norm_after_mlp


def layer_program_of(layer: Any) -> LayerProgram | None:
    """None for layers of an unknown class."""
    spec: LayerSpec | None = layer_spec_of(layer)
    if spec is None:
        return None
    is_recurrent = spec.recurrence is not None and spec.recurrence in layer

    def norm(name: str | None) -> nn.Module | None:
        return None if name is None else layer[name]

    return LayerProgram(
        layer[spec.recurrence if is_recurrent else spec.attention],
        is_recurrent,
        layer[spec.mlp],
        norm(spec.norm_before_mixer),
        norm(spec.norm_after_mixer),
        norm(spec.norm_before_mlp),
        norm(spec.norm_after_mlp),
        None if spec.multiplier is None else float(attrgetter(spec.multiplier)(layer)),
        spec.clipped,
    )


def decoder_of(model: Any) -> Any:
    """The module that has the model's decoder layers; None where they are elsewhere."""
    text = model.get("language_model", model)
    inner = text.get("model") if isinstance(text, nn.Module) else None
    return inner if isinstance(inner, nn.Module) and isinstance(inner.get("layers"), list) else None


def decoder_layers_of(model: Any) -> list[Any]:
    decoder = decoder_of(model)
    return [] if decoder is None else [*decoder.layers]
