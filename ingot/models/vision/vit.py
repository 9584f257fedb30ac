"""Vision transformers of equal tiles: patches, learned positions or rotary ones, layers that norm first. What
families call the parts of a layer differs, and little else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.errors import ModelError
from ingot.media.layout import Layout
from ingot.models.vision.blocks import RowNumbers, attended, taken, turned
from ingot.models.vision.slicing import Slicing, Work, by_rows, multiplications

RowWork = Callable[[mx.array], mx.array]
Angles = tuple[mx.array, mx.array]
"""Cosines and sines [rows, 1, size / 2]."""


@dataclass(frozen=True, slots=True)
class VitLayer:
    """A layer by its parts, each of which treats rows [rows, width] one by one."""

    before: RowWork  # the norm in front of attention
    joint: RowWork  # queries, keys and values, one behind another
    out: RowWork
    between: RowWork  # the norm in front of the MLP
    mlp: Any  # a module
    scales: tuple[Any, Any] = (1, 1)  # that attention and MLP are multiplied by

    def run(self, x: mx.array, heads: int, tiles: int, angles: Angles | None, slicing: Slicing) -> Work:
        """Rows attend within their tile."""
        count, width = x.shape

        def joint(rows: mx.array, *turns: mx.array) -> mx.array:
            made = self.joint(self.before(rows)).reshape(rows.shape[0], 3, heads, -1)
            return turned(made, *turns) if turns else made

        def behind(rows: RowNumbers, found: mx.array) -> mx.array:
            states = taken(x, rows) + self.out(found) * self.scales[0]
            return states + self.mlp(self.between(states)) * self.scales[1]

        ours = yield from by_rows(joint, slicing.rows(3 * width**2), x, *(angles or ()))
        segments = [np.arange(count, dtype=np.int32).reshape(tiles, -1)]
        return (yield from attended(ours, segments, behind, width**2 + multiplications(self.mlp), slicing))


@dataclass(frozen=True, slots=True)
class Vit:
    patches: Any  # the convolution that makes patches into rows
    layers: Sequence[VitLayer]
    heads: int
    slicing: Slicing
    positions: mx.array | None = None  # learned, [rows of a tile, width]
    first: mx.array | None = None  # a row in front of each tile's patches, [width]
    opening: RowWork | None = None  # a norm in front of all layers
    closing: RowWork | None = None  # and one behind them

    @property
    def width(self) -> int:
        width: int = self.patches.weight.shape[0]
        return width

    def states(self, pixels: mx.array, angles: Angles | None = None) -> Work:
        """Of patches [tiles, patches, numbers of one] the states [tiles, rows, width]."""
        tiles, _, numbers = pixels.shape
        rows = self.slicing.rows(numbers * self.width)
        x = yield from by_rows(self._embedded, rows, pixels.reshape(-1, numbers))
        x = self._placed(x.reshape(tiles, -1, self.width))
        rows = x.shape[1]
        x = x.reshape(-1, self.width)
        x = x if self.opening is None else self.opening(x)
        yield [x]
        for layer in self.layers:
            x = yield from layer.run(x, self.heads, tiles, angles, self.slicing)
        x = x if self.closing is None else self.closing(x)
        return x.reshape(tiles, rows, self.width)

    def _embedded(self, pixels: mx.array) -> mx.array:
        """The convolution of a patch with a kernel of its own size is a product."""
        weight = self.patches.weight.reshape(self.width, -1)
        embedded = pixels.astype(weight.dtype) @ weight.T
        return embedded + self.patches.bias if "bias" in self.patches else embedded

    def _placed(self, x: mx.array) -> mx.array:
        if self.first is not None:
            own = mx.broadcast_to(self.first.reshape(1, 1, -1).astype(x.dtype), (x.shape[0], 1, x.shape[2]))
            x = mx.concatenate([own, x], axis=1)
        return x if self.positions is None else x + self.positions.astype(x.dtype)


def learned(embeddings: Any) -> mx.array:
    """Positions that a module of CLIP's or SigLIP's kind has learned, also where their table is packed."""
    found = embeddings.position_embedding(mx.arange(embeddings.num_positions))
    mx.eval(found)
    return found


def clip_layer(layer: Any) -> VitLayer:
    """As mlx-vlm calls the parts of CLIP's and SigLIP's layers."""
    own = layer.self_attn
    return VitLayer(
        layer.layer_norm1, joined(own.q_proj, own.k_proj, own.v_proj), own.out_proj, layer.layer_norm2, layer.mlp
    )


def joined(*products: RowWork) -> RowWork:
    return lambda rows: mx.concatenate([product(rows) for product in products], axis=-1)


def up_to(layers: Sequence[Any], stated: Any) -> Sequence[Any]:
    """The layers in front of the states that a checkpoint takes as features: a number from the end, or from the start,
    where 0 is in front of all."""
    if not isinstance(stated, int):
        raise ModelError(f"vision_feature_layer {stated} asks for several layers' features, which are not supported.")
    return layers[: stated if stated >= 0 else len(layers) + 1 + stated]


def merged(states: mx.array, layout: Layout, along: int) -> mx.array:
    """[tiles, patches, width], in which blocks of `along` by `along` patches become one."""
    tiles, patches, width = states.shape
    rows, columns = layout.grid.h // along, layout.grid.w // along
    blocks = states.reshape(tiles, rows, along, columns, along, width).transpose(0, 1, 3, 2, 4, 5)
    return blocks.reshape(tiles, patches // along**2, along * along * width)
