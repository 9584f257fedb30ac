"""A model's decoder layers as programs: which parts a layer has and how they are put together, read from the family's
description.

Whoever runs whole layers at once (`fused_layers`, `decode_graph`) lowers these programs part by part, and refuses those
with a part that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.models.families.description import BlockSpec, LayerInputSpec, LayerMoeSpec, LayerSpec
from ingot.models.families.registry import layer_spec_of


@dataclass(frozen=True, slots=True, eq=False)
class ResidualBlock:
    """`x + multiplier * norm_after(part(norm_before(x)))`; norms that a family does not have are None."""

    part: Any
    norm_before: nn.Module | None
    norm_after: nn.Module | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputBlock:
    """The part of the block of a layer's own input."""

    spec: LayerInputSpec
    layer: Any


@dataclass(frozen=True, slots=True, eq=False)
class LayerMoe:
    """A mixture of experts whose router and experts are parts of the layer."""

    spec: LayerMoeSpec
    layer: Any


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """The part of a block that is the sum of several, each between norms of its own."""

    blocks: tuple[ResidualBlock, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LayerProgram:
    """The residual blocks of a layer, in the order in which they are computed."""

    blocks: tuple[ResidualBlock, ...]
    multiplier: float | None
    clipped: bool
    """Whether sums in float16 are kept finite."""
    scale: float | None
    """What the layer's output is multiplied by."""

    @property
    def parts(self) -> list[Any]:
        """Of all blocks, and of their branches."""
        branches = [block.part.blocks if isinstance(block.part, Branches) else (block,) for block in self.blocks]
        return [block.part for blocks in branches for block in blocks]


def layer_program_of(layer: Any) -> LayerProgram | None:
    """None for layers of an unknown class."""
    spec: LayerSpec | None = layer_spec_of(layer)
    if spec is None:
        return None
    described = spec.blocks
    if spec.other is not None and attrgetter(spec.other[0])(layer):
        described = (*described[:-1], spec.other[1])
    blocks = [_block(layer, block) for block in described]
    if spec.layer_input is not None and layer.get(spec.layer_input.gate) is not None:
        part = LayerInputBlock(spec.layer_input, layer)
        blocks.append(ResidualBlock(part, None, layer[spec.layer_input.norm_after]))
    return LayerProgram(
        tuple(blocks),
        None if spec.multiplier is None else _multiplier(layer, spec.multiplier, spec.depth),
        spec.clipped,
        None if spec.scale is None else _number(layer[spec.scale]),
    )


def _block(layer: Any, spec: BlockSpec) -> ResidualBlock:
    def norm(name: str | None) -> nn.Module | None:
        return None if name is None else layer[name]

    if not spec.branches:
        part = layer[next(part for part in spec.parts if part in layer)]
        return ResidualBlock(part, norm(spec.norm_before), norm(spec.norm_after))
    branches = [
        ResidualBlock(
            LayerMoe(each.part, layer) if isinstance(each.part, LayerMoeSpec) else layer[each.part],
            norm(each.norm_before),
            norm(each.norm_after),
        )
        for each in spec.branches
    ]
    return ResidualBlock(Branches(tuple(branches)), norm(spec.norm_before), norm(spec.norm_after))


def _multiplier(layer: Any, name: str, depth: str | None) -> float:
    return float(attrgetter(name)(layer)) / (1.0 if depth is None else attrgetter(depth)(layer) ** 0.5)


def _number(array: mx.array) -> float:
    value = array.item()
    assert isinstance(value, float)
    return value


def decoder_of(model: Any) -> Any:
    """The module that has the decoder layers of a model, or of a draft head, which has them itself; None where they are
    elsewhere."""
    text = model.get("language_model", model)
    inner = text.get("model", text.get("backbone", text)) if isinstance(text, nn.Module) else None
    return inner if isinstance(inner, nn.Module) and isinstance(inner.get("layers"), list) else None


def decoder_layers_of(model: Any) -> list[Any]:
    decoder = decoder_of(model)
    return [] if decoder is None else [*decoder.layers]
