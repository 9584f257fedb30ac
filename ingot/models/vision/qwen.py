"""The vision towers of Qwen 2, 2.5 and 3 VL and of Qwen 3.5: patches of pairs of frames, in blocks of `merge` by
`merge`.

Pairs of frames never see each other, so that a video is encoded a few pairs at a time. Positions for RoPE have three
axes (M-RoPE): time, row and column, found in one walk over the runs of a prompt's media.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.kernels.device import Device
from ingot.media.images import View
from ingot.media.items import MediaItem, TokenSpan
from ingot.media.layout import Grid, Layout, Size
from ingot.media.processor_parts import ProcessorFiles
from ingot.models.vision.tiles import PixelNormalization
from ingot.models.vision.tower import EncodingBytes, EncodingSlices, PixelArray, PositionArray, VisionFeatures
from ingot.models.vision.vit import (
    RowNumbers,
    Segments,
    VisionWork,
    WorkSlicing,
    attend_in_segments,
    compute_dtype_of,
    multiplications_per_row,
    rotate_heads,
    run_by_rows,
    take_rows,
)

QWEN_PARTS: Final = ("vision_tower",)
"""The tower's attribute of mlx-vlm's class of the whole model."""
CLIP_NORMALIZATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and deviation of colours where files state none: those of Qwen 2 and 2.5."""
ROPE_PERIOD = 10000.0
PATCHES_TOGETHER = 4096
"""Patches of a video's pairs that are encoded together, unless one pair has more."""


class QwenVisionTower:
    """`model` is mlx-vlm's, with the weights of its vision tower in the device's formats."""

    bidirectional = False
    stand_in = None

    def __init__(self, model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> None:
        self._vision = vision = model.vision_tower
        stated = vision.config
        self._merge, self._patch, self._pair = stated.spatial_merge_size, stated.patch_size, stated.temporal_patch_size
        self._heads: int = stated.num_heads
        self._width = int(getattr(stated, "embed_dim", 0) or stated.hidden_size)
        self._deepstack_layers: list[int] = list(getattr(stated, "deepstack_visual_indexes", ()))
        self._slicing = WorkSlicing.on(device)
        self._windows = _window_finder(vision, self._merge, self._patch)
        defaults = () if str(config["model_type"]).startswith("qwen3") else CLIP_NORMALIZATION
        self._normalize_image = PixelNormalization.stated(files.image_config, *defaults)
        self._normalize_video = PixelNormalization.stated(files.video_config or files.image_config, *defaults)
        self.axes = _mrope_axes(config)
        self._pace = float(stated.tokens_per_second) if config["model_type"] == "qwen2_5_vl" else None
        self._out = int(config.get("text_config", config).get("hidden_size") or config["hidden_size"])

    @property
    def modules(self) -> Sequence[Any]:
        return (self._vision,)

    @property
    def deep(self) -> int:
        return len(self._deepstack_layers)

    def positions(self, length: int, items: Sequence[MediaItem]) -> PositionArray:
        return mrope_positions(length, items, self._merge, self._pace)

    # Pixels

    def views(self, size: Size, layout: Layout) -> tuple[View, ...]:
        return ((layout.size,),)

    def pixels(self, item: MediaItem) -> PixelArray:
        """[patches, channels * pair * patch * patch]"""
        grid, normal = item.grid, self._normalize_image if item.kind == "image" else self._normalize_video
        patches = np.empty((grid.t, grid.h * grid.w, 3, self._pair, self._patch**2), dtype=np.float32)
        count = 0
        for frame in item.source.frames(*self.views(item.source.size, item.layout), resample=normal.resample):
            own = self._cut(normal(frame), grid)
            if item.kind == "image":
                patches[0] = own[:, :, None]
            else:
                patches[count // self._pair, :, :, count % self._pair] = own
            count += 1
        assert count == (1 if item.kind == "image" else grid.t * self._pair), "a layout's frames are those of its grid"
        return patches.reshape(grid.patches, -1)

    def _cut(self, frame: NDArray[np.float32], grid: Grid) -> NDArray[np.float32]:
        """[patches, 3, patch * patch], with those of a block of `merge` by `merge` together."""
        merge, patch = self._merge, self._patch
        blocks = frame.reshape(grid.h // merge, merge, patch, grid.w // merge, merge, patch, 3)
        return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(grid.h * grid.w, 3, patch * patch)

    # Features

    def encode(self, pixels: PixelArray, layout: Layout) -> EncodingSlices:
        grid = layout.grid
        frame = grid.h * grid.w
        together = max(1, PATCHES_TOGETHER // frame)
        found: list[VisionFeatures] = []
        for begin in range(0, grid.t, together):
            end = min(begin + together, grid.t)
            features = yield from self._encode_frames(
                pixels[begin * frame : end * frame], Grid(end - begin, grid.h, grid.w)
            )
            found.append(features)
        if len(found) == 1:
            return found[0]
        parts = [mx.concatenate(list(each)) for each in zip(*(features.arrays for features in found), strict=True)]
        return VisionFeatures(parts[0], tuple(parts[1:]))

    def _encode_frames(self, pixels: PixelArray, grid: Grid) -> EncodingSlices:
        vision = self._vision
        x = yield from self._embed(mx.array(pixels), grid)
        angles = _patch_rotation(grid, self._merge, self._width // self._heads)
        whole = [np.arange(grid.patches, dtype=np.int32).reshape(grid.t, -1)]
        deep = []
        for number, block in enumerate(vision.blocks):
            windows = None if self._windows is None else self._windows(number, grid)
            x = yield from self._layer(block, x, angles, whole if windows is None else windows)
            if number in self._deepstack_layers:
                merged = yield from self._merge_patches(
                    vision.deepstack_merger_list[self._deepstack_layers.index(number)], x
                )
                deep.append(merged)
        embeddings = yield from self._merge_patches(vision.merger, x)
        yield (embeddings, *deep)
        return VisionFeatures(embeddings, tuple(deep))

    def _embed(self, pixels: mx.array, grid: Grid) -> VisionWork:
        """The convolution of a patch with a kernel of its own size is a product."""
        project = self._vision.patch_embed.proj
        weight = project.weight.transpose(0, 4, 1, 2, 3).reshape(project.weight.shape[0], -1)

        def embed(own: mx.array, *learned: mx.array) -> mx.array:
            rows = own.astype(weight.dtype) @ weight.T
            rows = rows + project.bias if "bias" in project else rows
            return rows + self._learned(*learned).astype(rows.dtype) if learned else rows

        corners = self._corners(grid) if "pos_embed" in self._vision else ()
        return (yield from run_by_rows(embed, self._slicing.rows(weight.size), pixels, *corners))

    def _merge_patches(self, merger: Any, x: mx.array) -> VisionWork:
        each = multiplications_per_row(merger) // self._merge**2
        return (yield from run_by_rows(merger, self._slicing.rows(each), x))

    def _layer(self, block: Any, x: mx.array, angles: tuple[mx.array, mx.array], segments: Segments) -> VisionWork:
        attention = block.attn

        def heads(rows: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
            joint = attention.qkv(block.norm1(rows)).reshape(rows.shape[0], 3, self._heads, -1)
            return rotate_heads(joint, cos, sin)

        def finish(rows: RowNumbers, attended: mx.array) -> mx.array:
            states = take_rows(x, rows) + attention.proj(attended)
            after: mx.array = states + block.mlp(block.norm2(states))
            return after

        qkv = yield from run_by_rows(heads, self._slicing.rows(multiplications_per_row(attention.qkv)), x, *angles)
        each = multiplications_per_row(attention.proj, block.mlp)
        return (yield from attend_in_segments(qkv, segments, finish, each, self._slicing))

    def _corners(self, grid: Grid) -> tuple[mx.array, mx.array]:
        """The learned positions around each patch, [patches, 4], and their weights."""
        both = _position_corners(grid.h, grid.w, self._vision.num_grid_per_side, self._merge)
        numbers, weights = (mx.tile(mx.array(each.T), (grid.t, 1)) for each in both)
        return numbers, weights

    def _learned(self, numbers: mx.array, weights: mx.array) -> mx.array:
        """Positions interpolated between the learned ones."""
        corners = self._vision.pos_embed(numbers)
        learned: mx.array = (corners * weights.astype(corners.dtype)[..., None]).sum(axis=1)
        return learned

    # Memory

    def needs(self, layout: Layout) -> EncodingBytes:
        grid = layout.grid
        frame = grid.h * grid.w
        patches = min(grid.patches, max(frame, PATCHES_TOGETHER))
        rows = min(self._slicing.most, patches)
        inner = 4 * self._width
        size = self._width // self._heads
        queries = self._slicing.queries(self._heads, size, frame)
        scores = 2 * self._heads * queries * frame if self._slicing.unfused else 0
        work = 4 * (patches * (self._patch_size + 12 * self._width) + 4 * rows * inner + scores)
        return EncodingBytes(
            pixels=4 * grid.patches * self._patch_size,
            work=work,
            features=4 * layout.features * self._out * (1 + self.deep),
        )

    @property
    def _patch_size(self) -> int:
        return 3 * self._pair * self._patch**2

    @property
    def dtype(self) -> mx.Dtype:
        return compute_dtype_of(self._vision.blocks[0].attn.qkv)


def _mrope_axes(config: dict[str, Any]) -> tuple[int, ...]:
    text = config.get("text_config") or config
    stated = text.get("rope_scaling") or text.get("rope_parameters") or config.get("rope_scaling") or {}
    axes_of = interleaved_mrope_axes if str(config["model_type"]).startswith("qwen3") else contiguous_mrope_axes
    return axes_of(stated.get("mrope_section") or (11, 11, 10))


@lru_cache(maxsize=32)
def _coordinates(h: int, w: int, merge: int) -> NDArray[np.int64]:
    """[2, patches]: row and column of each patch of a frame, in the order in which they are cut."""
    rows, columns = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
    both = np.stack([rows, columns]).reshape(2, h // merge, merge, w // merge, merge)
    return both.transpose(0, 1, 3, 2, 4).reshape(2, -1)


def _patch_rotation(grid: Grid, merge: int, size: int) -> tuple[mx.array, mx.array]:
    """Cosines and sines [patches, 1, size / 2] for heads of `size`: half by rows, half by columns."""
    speeds = 1.0 / ROPE_PERIOD ** (np.arange(0, size // 2, 2, dtype=np.float32) / (size // 2))
    rows, columns = _coordinates(grid.h, grid.w, merge).astype(np.float32)
    angles = np.concatenate([rows[:, None] * speeds, columns[:, None] * speeds], axis=-1)
    tiled = mx.tile(mx.array(angles.astype(np.float32)), (grid.t, 1))[:, None]
    return mx.cos(tiled), mx.sin(tiled)


@lru_cache(maxsize=32)
def _position_corners(h: int, w: int, side: int, merge: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The four learned positions around each patch of a frame, [4, patches], and their weights."""
    rows, columns = _coordinates(h, w, merge)
    down, across = (np.linspace(0, side - 1, count, dtype=np.float32) for count in (h, w))
    neighbours = [[_neighbour(each, side, further) for further in (False, True)] for each in (down, across)]
    numbers = [row[rows] * side + column[columns] for row, _ in neighbours[0] for column, _ in neighbours[1]]
    weights = [one[rows] * other[columns] for _, one in neighbours[0] for _, other in neighbours[1]]
    return np.stack(numbers).astype(np.int32), np.stack(weights).astype(np.float32)


def _neighbour(at: NDArray[np.float32], side: int, further: bool) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The learned position before or after each coordinate, and its weight."""
    before = at.astype(np.int32)
    beyond = at - before
    return (np.minimum(before + 1, side - 1), beyond) if further else (before, 1 - beyond)


def _window_finder(vision: Any, merge: int, patch: int) -> Any:
    """Finds which rows attend to each other in a layer, where only some layers attend to a whole frame."""
    whole = getattr(vision, "fullatt_block_indexes", None)
    if whole is None:
        return None
    side = vision.window_size // merge // patch

    def segments(number: int, grid: Grid) -> Segments | None:
        return None if number in whole else _windows(grid, merge, side)

    return segments


@lru_cache(maxsize=8)
def _windows(grid: Grid, merge: int, side: int) -> Segments:
    """Blocks of `side` by `side` tokens of each frame, cut off at its edges; those of one size are one table."""
    rows, columns, unit = grid.h // merge, grid.w // merge, merge * merge
    tokens = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    by_size: dict[int, list[NDArray[np.int32]]] = {}
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            window = tokens[top : top + side, left : left + side].reshape(-1, 1)
            patches = (window * unit + np.arange(unit, dtype=np.int32)).astype(np.int32).reshape(-1)
            by_size.setdefault(patches.size, []).append(patches)
    frames = (np.arange(grid.t, dtype=np.int32) * grid.h * grid.w)[:, None, None]
    return [(np.stack(own)[None] + frames).reshape(-1, size) for size, own in by_size.items()]


PositionBlock = tuple[TokenSpan, Grid, float]
"""A run of tokens, its grid, and by how much time advances with each step of it."""


def mrope_positions(length: int, items: Sequence[MediaItem], merge: int, pace: float | None = None) -> PositionArray:
    """Text advances all axes together; an image begins where the text before it ended and spans its rows and columns,
    and text continues after the longer side.

    `merge` by `merge` patches make a token. Time advances by one with each step of a video, or by `pace` a second.
    Raises ValueError where a run is not as long as its grid.
    """
    positions = np.empty((3, length), dtype=np.int32)
    at = next_position = 0
    for (begin, end), grid, step in (block for item in items for block in _position_blocks(item, pace)):
        positions[:, at:begin] = np.arange(next_position, next_position + begin - at)
        next_position += begin - at
        rows, columns = grid.h // merge, grid.w // merge
        if end - begin != grid.t * rows * columns:
            raise ValueError(f"a run of {end - begin} tokens does not fit a grid of {grid}")
        times = (np.arange(grid.t, dtype=np.float32) * np.float32(step)).astype(np.int64)
        axes = np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")
        positions[:, begin:end] = next_position + np.stack(axes).reshape(3, -1)
        next_position += max(rows, columns)
        at = end
    positions[:, at:] = np.arange(next_position, next_position + length - at)
    return positions


def _position_blocks(item: MediaItem, pace: float | None) -> Iterator[PositionBlock]:
    grid = item.grid
    if len(item.runs) == grid.t:  # a run for each step
        yield from ((run, Grid(1, grid.h, grid.w), 1.0) for run in item.runs)
        return
    (run,) = item.runs
    yield run, grid, 1.0 if pace is None or item.kind == "image" else pace * item.layout.interval


def interleaved_mrope_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Axes in alternation, each as often as its section says, and the others the first (Qwen 3 VL and 3.5)."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for number in range(axis, 3 * sections[axis], 3):
            axes[number] = axis
    return tuple(axes)


def contiguous_mrope_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """One axis after another (Qwen 2 and 2.5 VL)."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
