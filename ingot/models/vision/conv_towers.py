"""The vision towers that have convolutions: of Gemma 3n (MobileNet V5) and of DeepSeek-OCR (SAM, and CLIP behind it).

Each block of MobileNet is a slice of its own. SAM's patches attend within windows, or in some layers everywhere, and
scores depend on how far apart two are; convolutions make 16 of its states into one, which CLIP takes for a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.media.images import BILINEAR, Pixels, View
from ingot.media.layout import Grid, Layout, Size
from ingot.media.processor_parts import ProcessorFiles
from ingot.models.layers.modules import swap_each
from ingot.models.layers.norms import swap_norms
from ingot.models.vision.tiles import (
    PixelNormalization,
    TiledVisionTower,
    cut_square_tiles,
    interpolated,
    on_canvas,
    resize_bicubic,
    resize_bilinear,
    tile_lines,
    with_line_ends,
)
from ingot.models.vision.tower import BARE_PREFIXES, LanguagePart, PixelArray
from ingot.models.vision.vit import (
    TILE_PATCHES_TOGETHER,
    RowNumbers,
    VisionWork,
    Vit,
    VitLayer,
    VitRotation,
    WorkSlicing,
    attend_in_segments,
    multiplications_per_row,
    run_by_rows,
)

GEMMA3N_PARTS: Final = ("vision_tower", "embed_vision")
GEMMA3N_LANGUAGE: Final = LanguagePart(
    "gemma3n",
    (
        ("model.language_model.", "model.language_model."),
        ("language_model.model.", "model.language_model."),
        ("language_model.", "model.language_model."),
    ),
    None,
)
GEMMA3N_FUSED: Final = (3, 4)
"""The groups of blocks whose states become features."""


def gemma3n_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """The last feature is the token behind an image, which has an embedding of the vision part's own. Raises ModelError
    where an image's states cannot be pooled to as many features as the config states."""
    vision, embed, stated = model.vision_tower.timm_model, model.embed_vision, model.config.vision_config
    swap_each(vision, _norm_of_last_axis)
    if device.kind == "cpu" and native.available():
        swap_norms(vision)
    hidden, patch = int(model.config.text_config.hidden_size), int(stated.patch_size)
    along = round(model.config.vision_soft_tokens_per_image**0.5)
    if along**2 != model.config.vision_soft_tokens_per_image:
        raise ModelError("vision_soft_tokens_per_image that is no square is not supported.")
    end = int(config.get("eoi_token_id") or embed.vocab_offset)

    def with_end(features: mx.array, layout: Layout) -> mx.array:
        return mx.concatenate([features, embed(input_ids=mx.array([end])).astype(features.dtype)])

    return TiledVisionTower(
        MobileNet(vision, patch, along, stated.hidden_size, WorkSlicing.on(device)),
        (model.vision_tower, embed),
        patch,
        hidden,
        PixelNormalization.stated(files.image_config, resample=BILINEAR),
        project=lambda rows: embed(inputs_embeds=rows * stated.hidden_size**0.5),
        finish=with_end,
        scaled=True,
        stand_in=0,
    )


def _norm_of_last_axis(module: Any) -> nn.Module | None:
    """For mlx-vlm's norm of channels and what follows it, which puts channels first for that and last again."""
    if type(module).__name__ != "RMSNormAct2d":
        return None
    norm = nn.RMSNorm(1, module.eps)
    norm.weight = module.weight
    return nn.Sequential(norm, module.act)


@dataclass(frozen=True, slots=True)
class MobileNet:
    """States of the last two groups of blocks, one beside the other, pooled to a square."""

    net: Any  # mlx-vlm's module
    patch: int
    along: int  # states along each side of the square
    width: int
    slicing: WorkSlicing

    def held(self, grids: Sequence[Grid], numbers: int) -> int:
        """See `Encoder`. On CPUs, what a convolution takes is unfolded at each of its places."""
        side, most, fused = grids[0].h * self.patch, 0, 0
        for number, group in enumerate([[self.net.conv_stem], *self.net.blocks]):
            for block in group:
                attends = "attn" in block
                for stride, outputs, unfolded in _convolutions(block):
                    taken, side = side, side if attends else side // stride
                    most = max(most, HELD * side**2 * outputs + taken**2 * unfolded)
                if attends:
                    most = max(
                        most, side**2 * (HELD * block.layer_scale.gamma.size + 2 * block.attn.num_heads * side**2)
                    )
            fused = side if number == GEMMA3N_FUSED[0] else fused
        fusion = sum(HELD * outputs + unfolded for _, outputs, unfolded in _convolutions(self.net.msfa.ffn))
        return max(most, fused**2 * fusion) + 2 * grids[0].patches * numbers

    def states(
        self, pixels: mx.array, grid: Grid, angles: VitRotation | None = None, learned: mx.array | None = None
    ) -> VisionWork:
        """See `Encoder`."""
        tiles, patch = pixels.shape[0], self.patch
        x = pixels.reshape(tiles, grid.h, grid.w, patch, patch, 3).swapaxes(2, 3)
        x = self.net.conv_stem(x.reshape(tiles, grid.h * patch, grid.w * patch, 3))
        yield [x]
        kept = []
        for number, group in enumerate(self.net.blocks, start=1):
            for block in group:
                x = block(x)
                yield [x]
            if number in GEMMA3N_FUSED:
                kept.append(x)
        rows, columns = kept[0].shape[1:3]
        enlarged = (mx.repeat(mx.repeat(x, rows // x.shape[1], 1), columns // x.shape[2], 2) for x in kept)
        x = self.net.msfa.ffn(mx.concatenate(list(enlarged), axis=-1))
        yield [x]
        if (rows, columns) != (self.along, self.along):
            blocks = x.reshape(tiles, self.along, rows // self.along, self.along, columns // self.along, -1)
            x = self.net.msfa.norm(blocks.mean(axis=(2, 4)))
        return x.reshape(tiles, self.along**2, -1)


class UnfoldedConvolution(nn.Module):
    """A convolution with zeros around its input, as a product of what lies under its kernel at each place."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        outputs, self._along, *_ = convolution.weight.shape
        self.stride: int = convolution.stride[0]
        self.product = nn.Linear(1, 1, bias=False)
        self.product.weight = convolution.weight.reshape(outputs, -1)
        if "bias" in convolution:
            self.product.bias = convolution.bias

    def __call__(self, x: mx.array) -> mx.array:
        lengths = [-(-length // self.stride) for length in x.shape[1:3]]
        spans = [(length - 1) * self.stride + 1 for length in lengths]
        missing = [max(0, span + self._along - 1 - own) for span, own in zip(spans, x.shape[1:3], strict=True)]
        padded = mx.pad(x, [(0, 0), *((each // 2, each - each // 2) for each in missing), (0, 0)])
        parts = [
            padded[:, top : top + spans[0] : self.stride, left : left + spans[1] : self.stride]
            for top in range(self._along)
            for left in range(self._along)
        ]
        found: mx.array = self.product(mx.concatenate(parts, axis=-1))
        return found


def product_of_convolution(module: Any) -> nn.Module | None:
    """For CPUs, whose native kernels compute products: of a convolution of single pixels, or with zeros around its
    input so that its output is as large."""
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or module.dilation not in (1, (1, 1)):
        return None
    _, rows, columns, _ = module.weight.shape
    if type(module).__name__ == "Conv2dSame" and rows == columns:
        return UnfoldedConvolution(module)
    pixels = (rows, columns, *module.stride, *module.padding) == (1, 1, 1, 1, 0, 0)
    return UnfoldedConvolution(module).product if pixels and type(module) is nn.Conv2d else None


HELD: Final = 6
"""As many arrays of a convolution's size are there at a time: its input, its own, and what norms and GELUs make."""


def _convolutions(block: Any) -> Iterator[tuple[int, int, int]]:
    """The stride, outputs and unfolded numbers of each convolution, in order."""
    for path, module in reversed(block.named_modules()):
        if isinstance(module, UnfoldedConvolution):
            outputs, unfolded = module.product.weight.shape
            yield module.stride, outputs, unfolded
        elif isinstance(module, nn.Conv2d):
            outputs, *kernel = module.weight.shape
            yield module.stride[0], outputs, kernel[0] * kernel[1] * kernel[2]
        elif isinstance(module, nn.Linear) and not path.endswith("product"):  # of single pixels
            yield 1, module.weight.shape[0], 0


DEEPSEEK_OCR_PARTS: Final = ("sam_model", "vision_model", "projector")
DEEPSEEK_OCR_ARRAYS: Final = ("image_newline", "view_separator")
DEEPSEEK_OCR_LANGUAGE: Final = LanguagePart("deepseek", BARE_PREFIXES)
GREY: Final = 127


def deepseek_ocr_tower(model: Any, config: dict[str, Any], files: ProcessorFiles, device: Device) -> TiledVisionTower:
    """Tiles of a larger image first, and the whole image on a grey square last, whose lines end in a feature of their
    own. Raises ModelError for another projector than a matrix."""
    if model.config.projector_config.projector_type != "linear":
        raise ModelError("projector_type other than linear is not supported.")
    sam, normal = model.sam_model, PixelNormalization.stated(files.image_config or files.processor)
    patch = int(sam.patch_embed.proj.weight.shape[1])

    def sizes(layout: Layout) -> tuple[Size, Size | None]:
        """Of the square, and of all tiles."""
        whole = layout.apart or layout.grid
        return Size(whole.w * patch, whole.h * patch), None if layout.apart is None else layout.size

    def views(size: Size, layout: Layout) -> Sequence[View]:
        square, tiled = sizes(layout)
        whole = (contained(size, square),)
        return (whole,) if tiled is None else ((tiled,), whole)

    def cut(frames: Sequence[Pixels], layout: Layout) -> Iterator[PixelArray]:
        """Row by row, and the whole image last."""
        square, tiled = sizes(layout)
        for tile in () if tiled is None else cut_square_tiles(frames[0], layout.grid.h * patch):
            yield normal(tile)
        yield normal(on_canvas(frames[-1], square, GREY, round))

    def lines(features: mx.array, layout: Layout) -> mx.array:
        whole = layout.apart or layout.grid
        along = _reduced(whole).h
        parts = [tile_lines(features[-(along**2) :], 1, along)]
        if layout.arranged is not None:
            parts.insert(0, tile_lines(features[: -(along**2)], layout.arranged.width, _reduced(layout.grid).h))
        ended = [with_line_ends(part, model.image_newline) for part in parts]
        return mx.concatenate([*ended, model.view_separator[None].astype(features.dtype)])

    return TiledVisionTower(
        SamClip.of(model, WorkSlicing.on(device)),
        (sam, model.vision_model, model.projector),
        patch,
        int(model.config.projector_config.n_embed),
        normal,
        views=views,
        cut=cut,
        project=model.projector.layers,
        finish=lines,
    )


def contained(size: Size, canvas: Size) -> Size:
    """The largest size of this shape within a canvas."""
    if size.width * canvas.height > size.height * canvas.width:
        return Size(canvas.width, max(1, round(size.height / size.width * canvas.width)))
    return Size(max(1, round(size.width / size.height * canvas.height)), canvas.height)


def _reduced(grid: Grid) -> Grid:
    """Four by four states become one, by two convolutions."""
    return Grid(grid.t, -(-grid.h // 4), -(-grid.w // 4))


SamTables = tuple[mx.array, mx.array]
"""[side, side, size]: what a query is multiplied by for each distance of rows, and of columns, from its own."""


@dataclass(frozen=True, slots=True)
class SamClip:
    """The states of CLIP, and of SAM beside them."""

    sam: Any  # mlx-vlm's module
    patches: Vit
    clip: Vit
    sam_positions: Callable[[Grid], mx.array]
    clip_positions: Callable[[Grid], mx.array]
    width: int
    slicing: WorkSlicing

    @classmethod
    def of(cls, model: Any, slicing: WorkSlicing) -> SamClip:
        sam, vision = model.sam_model, model.vision_model
        own, soft = vision.embeddings, partial(resize_bicubic, antialias=True)
        for layer in vision.transformer.layers:
            layer.mlp.activation_fn = nn.GELU(approx="fast")  # its makers', where mlx-vlm's is exact
        layers = [
            VitLayer(each.layer_norm1, each.self_attn.qkv_proj, each.self_attn.out_proj, each.layer_norm2, each.mlp)
            for each in vision.transformer.layers
        ]
        clip = Vit(
            own.patch_embedding,
            layers,
            vision.config.num_attention_heads,
            slicing,
            first=own.class_embedding,
            opening=vision.pre_layrnorm,
        )
        learned = interpolated(lambda: own.position_embedding(mx.arange(1, own.num_positions)), soft)

        def clip_positions(grid: Grid) -> mx.array:
            return mx.concatenate([own.position_embedding(mx.array([0])), learned(grid)])

        return cls(
            sam,
            Vit(sam.patch_embed.proj, (), 1, slicing),
            clip,
            interpolated(lambda: sam.pos_embed[0].flatten(end_axis=1), soft),
            clip_positions,
            clip.width + int(sam.net_3.weight.shape[0]),
            slicing,
        )

    def held(self, grids: Sequence[Grid], numbers: int) -> int:
        """See `Encoder`."""
        attention, width, most = self.sam.blocks[0].attn, self.patches.width, 0
        for grid in grids:
            together = max(1, min(grid.t, TILE_PATCHES_TOGETHER // (grid.h * grid.w)))
            for side in {block.window_size or grid.h for block in self.sam.blocks}:
                rows = together * (-(-grid.h // side) * side) ** 2
                size = width // attention.num_heads + 2 * side
                queries = self.slicing.queries(attention.num_heads, size, side**2)
                scores = 3 * attention.num_heads * queries * side**2
                tables = 2 * min(rows, self.slicing.most) * side * width // attention.num_heads
                most = max(most, rows * (6 * width + 6 * attention.num_heads * size) + scores + tables)
            states = together * grid.h * grid.w
            most = max(most, states * sum(map(_unfolded, (self.sam.neck[2], self.sam.net_2))))
            reduced = _reduced(grid)
            most = max(most, self.clip.held([reduced], 0)) + 2 * states * (numbers + width)
        return most + 16 * self.slicing.most * width

    def states(
        self, pixels: mx.array, grid: Grid, angles: VitRotation | None = None, learned: mx.array | None = None
    ) -> VisionWork:
        """See `Encoder`."""
        tiles = pixels.shape[0]
        x = yield from self.patches.states(pixels, grid, learned=self.sam_positions(grid))
        for block in self.sam.blocks:
            x = yield from self._sam_layer(block, x.reshape(tiles, grid.h, grid.w, -1))
        x = x.reshape(tiles, grid.h, grid.w, -1)
        for step in (*self.sam.neck, self.sam.net_2, self.sam.net_3):
            x = step(x)
            yield [x]
        x = x.flatten(1, 2)
        reduced = _reduced(grid)
        seen = yield from self.clip.layer_states(x, reduced, learned=self.clip_positions(reduced))
        return mx.concatenate([seen[:, 1:], x], axis=-1)

    def _sam_layer(self, block: Any, x: mx.array) -> VisionWork:
        """[tiles, rows, columns, width] to [tiles * rows * columns, width]."""
        tiles, side, _, width = x.shape
        window = int(block.window_size) or side
        beyond = -side % window  # which are zeros that are seen like others
        along = (side + beyond) // window
        padded = mx.pad(block.norm1(x), [(0, 0), (0, beyond), (0, beyond), (0, 0)])
        windows = padded.reshape(tiles, along, window, along, window, width).swapaxes(2, 3).reshape(-1, width)
        attended = yield from self._attended(block.attn, windows, window)
        attended = attended.reshape(tiles, along, along, window, window, width).swapaxes(2, 3)
        attended = attended.reshape(tiles, side + beyond, side + beyond, width)[:, :side, :side]
        rows = (x + attended).reshape(-1, width)
        each = multiplications_per_row(block.mlp)
        return (yield from run_by_rows(lambda own: own + block.mlp(block.norm2(own)), self.slicing.rows(each), rows))

    def _attended(self, attention: Any, windows: mx.array, side: int) -> VisionWork:
        """Rows attend within windows of `side` by `side`. What is added to a score for the rows and columns between two
        patches is a product, too: of what the query is for each row and column, and of the key's own."""
        count, width = windows.shape
        heads, (down, across) = attention.num_heads, np.divmod(np.arange(count) % side**2, side)
        size = width // heads
        tables, whole = _sam_tables(attention, side), size + 2 * side
        own = mx.eye(side)

        def joint(rows: mx.array, down: mx.array, across: mx.array) -> mx.array:
            queries, keys, values = (
                rows_of[:, 0] for rows_of in mx.split(attention.qkv(rows).reshape(-1, 3, heads, size), 3, axis=1)
            )
            places = [
                queries @ table[at].swapaxes(1, 2) * whole**0.5
                for table, at in zip(tables, (down, across), strict=True)
            ]
            marks = [mx.broadcast_to(own[at][:, None], (rows.shape[0], heads, side)) for at in (down, across)]
            nothing = mx.zeros((rows.shape[0], heads, 2 * side), values.dtype)
            sides = [queries * (whole / size) ** 0.5, *places], [keys, *marks], [values, nothing]
            return mx.stack([mx.concatenate(parts, axis=-1).astype(values.dtype) for parts in sides], axis=1)

        def finish(numbers: RowNumbers, attended: mx.array) -> mx.array:
            found: mx.array = attention.proj(attended.reshape(-1, heads, whole)[..., :size].reshape(-1, width))
            return found

        each = 3 * width**2 + 2 * width * side
        places = (mx.array(at.astype(np.int32)) for at in (down, across))
        qkv = yield from run_by_rows(joint, self.slicing.rows(each), windows, *places)
        segments = [np.arange(count, dtype=np.int32).reshape(-1, side**2)]
        return (yield from attend_in_segments(qkv, segments, finish, width**2, self.slicing))


def _sam_tables(attention: Any, side: int) -> SamTables:
    """Learned for a certain side, and interpolated for others."""
    numbers = np.arange(side)
    distances = mx.array((numbers[:, None] - numbers[None] + side - 1).astype(np.int32))

    def table(learned: mx.array) -> mx.array:
        if learned.shape[0] != 2 * side - 1:
            line = np.array(learned.astype(mx.float32))[None]
            learned = mx.array(resize_bilinear(line, Size(2 * side - 1, 1))[0]).astype(learned.dtype)
        return learned[distances]

    return table(attention.rel_pos_h), table(attention.rel_pos_w)


def _unfolded(convolution: Any) -> int:
    return int(convolution.weight[0].size + HELD * convolution.weight.shape[0])
