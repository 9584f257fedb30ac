"""Vision transformers, computed in slices, so that decoding waits for no more than one of them.

A slice is as much arithmetic as takes some hundredths of a second, whatever the tower and the image. How work is sliced
follows from shapes alone, so that features depend on nothing else in the batch. `Vit` is a transformer of equal tiles:
patches, learned or rotary positions, layers that norm first. Patches attend to those of their segment (an image, a pair
of frames, a window), no others; segments of one size are one table of row numbers, [segments, rows].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device, DeviceKind
from ingot.media.layout import Grid

RowFunction = Callable[[mx.array], mx.array]
HeadPairs = Literal["halves", "neighbours", "axes"] | tuple[int, ...]
"""Which two numbers of a head are rotated together: those of its halves, neighbours, or those of the halves of each of
its two halves, of which one is rotated by columns and the other by rows. Or an order of its numbers in which they are
those of its halves."""
VitRotation = tuple[mx.array, mx.array]
"""Cosines and sines [rows, 1, size / 2]."""
GridOrder = Literal["rows first", "columns first", "alternating"]
RowNumbers = NDArray[np.int32]
Segments = Sequence[RowNumbers]
FUSED_SIZES = (64, 80, 128)
"""Head sizes for which GPUs have a fused attention kernel."""
VisionWork = Generator[Sequence[mx.array], None, mx.array]
SLICE_WORK: Final[dict[DeviceKind, int]] = {"cpu": 1 << 30, "cuda": 1 << 38, "metal": 1 << 35}
"""The most multiplications of a slice, unless its fewest rows take more."""
SLICE_ROWS: Final[dict[DeviceKind, int]] = {"cpu": 512, "cuda": 8192, "metal": 4096}
"""The most rows of a slice."""
FEWEST_ROWS: Final = 16
"""Slices have a multiple of this many rows: merging neighbouring patches takes several at once."""
SCORE_BYTES: Final = 64 << 20
"""The most that scores of one slice take where attention is not fused."""


@dataclass(frozen=True, slots=True)
class VitLayer:
    """A layer's parts, each of which computes rows [rows, width] independently."""

    before: RowFunction  # the norm before attention
    joint: RowFunction  # queries, keys and values, concatenated
    out: RowFunction
    between: RowFunction  # the norm before the MLP
    mlp: Any  # a module
    scales: tuple[Any, Any] = (1, 1)  # of attention and MLP
    after: tuple[RowFunction, RowFunction] | None = None  # norms of what attention and the MLP give
    pairs: HeadPairs = "halves"

    def run(self, x: mx.array, heads: int, tiles: int, angles: VitRotation | None, slicing: WorkSlicing) -> VisionWork:
        """Rows attend within their tile."""
        count, width = x.shape

        def joint(rows: mx.array, *rotation: mx.array) -> mx.array:
            heads_of_rows = self.joint(self.before(rows)).reshape(rows.shape[0], 3, heads, -1)
            return rotate_heads(heads_in_halves(heads_of_rows, self.pairs), *rotation) if rotation else heads_of_rows

        def finish(rows: RowNumbers, attended: mx.array) -> mx.array:
            after_attention, after_mlp = self.after or (_unchanged, _unchanged)
            states = take_rows(x, rows) + after_attention(self.out(attended)) * self.scales[0]
            return states + after_mlp(self.mlp(self.between(states))) * self.scales[1]

        qkv = yield from run_by_rows(joint, slicing.rows(3 * width**2), x, *(angles or ()))
        segments = [np.arange(count, dtype=np.int32).reshape(tiles, -1)]
        return (
            yield from attend_in_segments(qkv, segments, finish, width**2 + multiplications_per_row(self.mlp), slicing)
        )


@dataclass(frozen=True, slots=True)
class VitMerging:
    """Between layers, blocks of two by two rows become one."""

    behind: int  # so many layers
    merge: RowFunction  # from [blocks, 4 * width] to [blocks, width]
    each: int  # multiplications of a block


TILE_PATCHES_TOGETHER = 4096
"""Patches of tiles that are encoded together, unless one tile has more."""


class Encoder(Protocol):
    """What makes patches of tiles into states."""

    @property
    def width(self) -> int:
        """Of a state."""

    @property
    def slicing(self) -> WorkSlicing: ...

    def held(self, grids: Sequence[Grid], numbers: int) -> int:
        """How many numbers are in memory at most while tiles of these grids are encoded, whose patches have so many."""

    def states(
        self, pixels: mx.array, grid: Grid, angles: VitRotation | None = None, learned: mx.array | None = None
    ) -> VisionWork:
        """From patches [tiles, patches, numbers] to states [tiles, rows, width]. `learned`: positions of the rows where
        they are not always the same."""


@dataclass(frozen=True, slots=True)
class Vit:
    patches: Any  # the convolution or the linear layer that makes patches into rows
    layers: Sequence[VitLayer]
    heads: int
    slicing: WorkSlicing
    positions: mx.array | None = None  # learned, [rows of a tile, width]
    first: mx.array | None = None  # a row before each tile's patches, [width]
    before: RowFunction | None = None  # what is done to the numbers of patches
    embedded: RowFunction | None = None  # a norm before positions are added
    opening: RowFunction | None = None  # a norm before all layers
    closing: RowFunction | None = None  # and one after them
    merging: VitMerging | None = None
    gathered: tuple[int, ...] = ()  # the states behind so many layers each, side by side, are those of all

    @property
    def width(self) -> int:
        return self._row * max(1, len(self.gathered))

    @property
    def _row(self) -> int:
        width: int = self.patches.weight.shape[0]
        return width

    def held(self, grids: Sequence[Grid], numbers: int) -> int:
        """See `Encoder`."""
        tile = max(grid.h * grid.w for grid in grids) + (self.first is not None)
        states = sum(grid.t * (grid.h * grid.w + 1) for grid in grids)
        seen = min(states, max(tile, TILE_PATCHES_TOGETHER))
        rows = min(self.slicing.most, seen)
        queries = self.slicing.queries(self.heads, self._row // self.heads, tile)
        scores = 2 * self.heads * queries * tile if self.slicing.unfused else 0
        further = 2 * len(self.gathered)
        return seen * (numbers + (12 + further) * self._row) + 16 * rows * self._row + scores

    def states(
        self, pixels: mx.array, grid: Grid, angles: VitRotation | None = None, learned: mx.array | None = None
    ) -> VisionWork:
        """See `Encoder`."""
        tiles, _, numbers = pixels.shape
        rows = self.slicing.rows(numbers * self._row)
        x = yield from run_by_rows(self._embed, rows, pixels.reshape(-1, numbers))
        return (yield from self.layer_states(x.reshape(tiles, -1, self._row), grid, angles, learned))

    def layer_states(
        self, x: mx.array, grid: Grid, angles: VitRotation | None = None, learned: mx.array | None = None
    ) -> VisionWork:
        """From embedded patches [tiles, patches, width]."""
        if self.first is not None:
            own = mx.broadcast_to(self.first.reshape(1, 1, -1).astype(x.dtype), (x.shape[0], 1, x.shape[2]))
            x = mx.concatenate([own, x], axis=1)
        positions = self.positions if learned is None else learned
        x = x if positions is None else x + positions.astype(x.dtype)
        tiles, rows, _ = x.shape
        x = x.reshape(-1, self._row)
        if angles is not None and tiles > 1:
            angles = mx.tile(angles[0], (tiles, 1, 1)), mx.tile(angles[1], (tiles, 1, 1))
        x = x if self.opening is None else self.opening(x)
        yield [x]
        kept: dict[int, mx.array] = {}
        for number, layer in enumerate(self.layers, start=1):
            x = yield from layer.run(x, self.heads, tiles, angles, self.slicing)
            if self.merging is not None and self.merging.behind == number:
                blocks = merge_patches(x.reshape(tiles, rows, self._row), grid, 2)
                rows, each = blocks.shape[1], self.slicing.rows(self.merging.each)
                x = yield from run_by_rows(self.merging.merge, each, blocks.reshape(-1, 4 * self._row))
            if number in self.gathered:
                kept[number] = x
        if self.gathered:
            x = mx.concatenate([kept[number] for number in self.gathered], axis=-1)
            yield [x]
        x = x if self.closing is None else self.closing(x)
        return x.reshape(tiles, rows, self.width)

    def _embed(self, pixels: mx.array) -> mx.array:
        """The convolution of a patch with a kernel of its own size is a product."""
        pixels = pixels if self.before is None else self.before(pixels)
        if isinstance(self.patches, nn.Linear | nn.QuantizedLinear):
            embedded = self.patches(pixels.astype(compute_dtype_of(self.patches)))
        else:
            weight = self.patches.weight.reshape(self._row, -1)
            embedded = pixels.astype(weight.dtype) @ weight.T
            embedded = embedded + self.patches.bias if "bias" in self.patches else embedded
        return embedded if self.embedded is None else self.embedded(embedded)


def clip_vit(vision: Any, layers: Sequence[Any], heads: int, device: Device, **more: Any) -> Vit:
    """Of CLIP's or SigLIP's kind, with these layers."""
    own = vision.embeddings
    positions = own.position_embedding(mx.arange(own.num_positions))  # also where their table is quantised
    mx.eval(positions)
    return Vit(
        own.patch_embedding, [*map(clip_layer, layers)], heads, WorkSlicing.on(device), positions=positions, **more
    )


def clip_layer(layer: Any) -> VitLayer:
    """By mlx-vlm's names of the parts of CLIP's and SigLIP's layers."""
    own = layer.self_attn
    return VitLayer(
        layer.layer_norm1,
        joint_projection_of(own.q_proj, own.k_proj, own.v_proj),
        own.out_proj,
        layer.layer_norm2,
        layer.mlp,
    )


def joint_projection_of(*products: RowFunction) -> RowFunction:
    return lambda rows: mx.concatenate([product(rows) for product in products], axis=-1)


def layers_up_to(layers: Sequence[Any], stated: Any) -> Sequence[Any]:
    """The layers before the states that a checkpoint uses as features: a number from the end, or from the start, where
    0 is before all."""
    if not isinstance(stated, int):
        raise ModelError(
            f"vision_feature_layer {stated} selects the features of several layers, which is not supported."
        )
    return layers[: stated if stated >= 0 else len(layers) + 1 + stated]


def merge_patches(states: mx.array, grid: Grid, along: int) -> mx.array:
    """[tiles, patches, width], in which blocks of `along` by `along` patches become one."""
    tiles, patches, width = states.shape
    rows, columns = grid.h // along, grid.w // along
    blocks = states.reshape(tiles, rows, along, columns, along, width).transpose(0, 1, 3, 2, 4, 5)
    return blocks.reshape(tiles, patches // along**2, along * along * width)


def attend_in_segments(
    heads: mx.array,
    segments: Segments,
    finish: Callable[[RowNumbers, mx.array], mx.array],
    each: int,
    slicing: WorkSlicing,
) -> VisionWork:
    """Queries, keys and values [rows, 3, heads, size] attend within segments; `finish(rows, attended)` computes the
    rest of a layer for some of its rows, in `each` multiplications a row. The results come in the rows' order."""
    count, size = heads.shape[2:]
    done: list[mx.array] = []
    order: list[RowNumbers] = []
    for table in segments:
        most, before = slicing.queries(count, size, table.shape[1], each), None
        for chosen, rows in _attention_tiles(table, most):
            own = table[chosen]
            if chosen != before:  # tiles of one long segment have the same keys
                before, keys_and_values = chosen, (take_rows(heads[:, 1], own), take_rows(heads[:, 2], own))
            query_rows = own if rows is None else own[:, rows]
            attended = _attend_tile(take_rows(heads[:, 0], query_rows), *keys_and_values, slicing)
            numbers = query_rows.reshape(-1)
            done.append(finish(numbers, attended.reshape(numbers.size, count * size)))
            order.append(numbers)
            yield done[-1:]
    whole = yield from join_slices(done)
    back = np.argsort(np.concatenate(order), kind="stable").astype(np.int32)
    return whole if np.array_equal(back, np.arange(back.size)) else whole[mx.array(back)]


def take_rows(x: mx.array, numbers: RowNumbers) -> mx.array:
    """Rows of these numbers, in their shape: not copied where they are contiguous."""
    flat = numbers.reshape(-1)
    begin, end = int(flat[0]), int(flat[-1]) + 1
    if end - begin == flat.size and np.array_equal(flat, np.arange(begin, end)):
        return x[begin:end].reshape(*numbers.shape, *x.shape[1:])
    return x[mx.array(numbers)]


def _attention_tiles(table: RowNumbers, most: int) -> list[tuple[slice, slice | None]]:
    """Which segments of a table attend at once; or which rows of one of them, where it is long."""
    count, rows = table.shape
    if rows <= most:
        together = max(1, most // rows)
        return [(slice(begin, begin + together), None) for begin in range(0, count, together)]
    return [
        (slice(number, number + 1), slice(begin, begin + most))
        for number in range(count)
        for begin in range(0, rows, most)
    ]


def _attend_tile(queries: mx.array, keys: mx.array, values: mx.array, slicing: WorkSlicing) -> mx.array:
    """[segments, rows, heads, size] each, to all keys of the same segment."""
    size = queries.shape[-1]
    if slicing.native:
        return native.attend_segments(queries, keys, values, size**-0.5).astype(queries.dtype)
    wanted = size if slicing.unfused else next((fused for fused in FUSED_SIZES if size <= fused), size)
    padding = [(0, 0), (0, 0), (0, 0), (0, wanted - size)]
    parts = [part if wanted == size else mx.pad(part, padding) for part in (queries, keys, values)]
    attended = mx.fast.scaled_dot_product_attention(
        *(part.swapaxes(1, 2) for part in parts), scale=size**-0.5, mask=None
    )
    return attended.swapaxes(1, 2)[..., :size]


def heads_in_halves(heads: mx.array, pairs: HeadPairs) -> mx.array:
    """Queries, keys and values [rows, 3, heads, size], whose queries and keys are put in an order in which a head's
    halves are rotated together. That changes no product of theirs."""
    if pairs == "halves":
        return heads
    rows, _, count, size = heads.shape
    turned = heads[:, :2]
    if isinstance(pairs, tuple):
        turned = turned[..., mx.array(pairs, dtype=mx.int32)]
    elif pairs == "neighbours":
        turned = turned.reshape(rows, 2, count, size // 2, 2).swapaxes(-1, -2)
    else:
        turned = turned.reshape(rows, 2, count, 2, 2, size // 4).swapaxes(-2, -3)
    return mx.concatenate([turned.reshape(rows, 2, count, size), heads[:, 2:]], axis=1)


@lru_cache(maxsize=16)
def grid_rotation(grid: Grid, size: int, theta: float, order: GridOrder = "rows first", begin: int = 0) -> VitRotation:
    """The rotation of a tile's patches by row and by column, for heads of `size`: half of the frequencies by each, one
    after the other or (`alternating`) in turns, columns first. Where rows and columns do not `begin` at zero, there is
    a row that is not rotated before them."""
    speeds = 1.0 / theta ** (np.arange(0, size // 2, 2, dtype=np.float32) / (size // 2))
    down, across = np.meshgrid(np.arange(grid.h), np.arange(grid.w), indexing="ij")
    rows, columns = (down.reshape(-1, 1) + begin) * speeds, (across.reshape(-1, 1) + begin) * speeds
    if order == "alternating":
        angles = np.stack([columns, rows], axis=-1).reshape(rows.shape[0], -1)
    else:
        angles = np.concatenate([rows, columns] if order == "rows first" else [columns, rows], axis=-1)
    angles = np.concatenate([np.zeros_like(angles[:1]), angles]) if begin else angles
    rotated = mx.array(angles.astype(np.float32))[:, None]
    return mx.cos(rotated), mx.sin(rotated)


def _unchanged(rows: mx.array) -> mx.array:
    return rows


def rotate_heads(heads: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Queries, keys and values [rows, 3, heads, size], of which the first two are rotated by angles
    [rows, 1, size / 2]."""
    cos, sin = cos[:, None], sin[:, None]
    one, two = mx.split(heads[:, :2].astype(mx.float32), 2, axis=-1)
    both = mx.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)
    return mx.concatenate([both.astype(heads.dtype), heads[:, 2:]], axis=1)


def compute_dtype_of(module: Any) -> mx.Dtype:
    """A layer's activation dtype: our kernels for 16-bit weights compute in float32."""
    from ingot.models.layers.modules import DenseLinear, PackedLinear

    if isinstance(module, DenseLinear | PackedLinear):
        return mx.float32
    dtype: mx.Dtype = module.weight.dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else module.scales.dtype


@dataclass(frozen=True, slots=True)
class WorkSlicing:
    most: int  # rows of a slice
    work: int  # multiplications of one
    native: bool  # whether a kernel of ours attends
    unfused: bool  # whether the scores of a slice are in memory at once

    @classmethod
    def on(cls, device: Device) -> WorkSlicing:
        ours = device.kind == "cpu" and native.can_attend_segments()
        return cls(SLICE_ROWS[device.kind], SLICE_WORK[device.kind], ours, device.unfused_attention and not ours)

    def rows(self, each: int) -> int:
        """Rows of a slice, with `each` multiplications a row."""
        return min(self.most, max(1, self.work // (FEWEST_ROWS * max(1, each))) * FEWEST_ROWS)

    def queries(self, heads: int, size: int, keys: int, after: int = 0) -> int:
        """Rows of a slice that attend to this many keys, with `after` multiplications a row afterwards."""
        rows = self.rows(2 * heads * size * keys + after)
        fused = not self.unfused and size <= FUSED_SIZES[-1]
        return rows if self.native or fused else max(FEWEST_ROWS, min(rows, SCORE_BYTES // (8 * heads * keys)))


def run_by_rows(work: Callable[..., mx.array], rows: int, *arrays: mx.array) -> VisionWork:
    """Applies `work` to this many rows of all arrays at a time."""
    done = []
    for begin in range(0, arrays[0].shape[0], rows):
        done.append(work(*(array[begin : begin + rows] for array in arrays)))
        yield done[-1:]
    return (yield from join_slices(done))


def join_slices(parts: Sequence[mx.array]) -> VisionWork:
    """Concatenated, as a slice of its own: an image's states are many bytes."""
    if len(parts) == 1:
        return parts[0]
    whole = mx.concatenate(list(parts))
    yield [whole]
    return whole


def multiplications_per_row(*modules: Any) -> int:
    """By all matrices of these modules."""
    layers = (layer for module in modules for _, layer in module.named_modules())
    return sum(math.prod(_weight_shape(layer)) for layer in layers if "weight" in layer and layer.weight.ndim == 2)


def _weight_shape(layer: Any) -> tuple[int, ...]:
    if "scales" not in layer:
        shape: tuple[int, ...] = layer.weight.shape
        return shape
    return layer.weight.size * layer.weight.dtype.size * 8 // layer.bits, 1
