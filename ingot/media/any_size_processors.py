"""The image processors of families whose towers see an image in its own shape, and of Llama 4."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from ingot.errors import ModelError, Unsupported
from ingot.media.layout import (
    ITEM_NUMBER,
    Grid,
    ImageLayoutOptions,
    Layout,
    MediaKind,
    Placeholder,
    Size,
    VideoHeader,
    VideoLayoutOptions,
)
from ingot.media.processor_parts import (
    ImagesOnly,
    PixelRange,
    ProcessorFiles,
    config_side,
    fit_to_pixels,
    nearest_arrangement,
)

GEMMA4_IMAGE, GEMMA4_START, GEMMA4_END = "<|image|>", "<|image>", "<image|>"
GEMMA4_LOW_DETAIL: Final = 70
"""Tokens: the fewest that its makers trained it with."""


@dataclass(frozen=True, slots=True)
class Gemma4Processor(ImagesOnly):
    FAMILY = "Gemma 4"
    PLACEHOLDER = GEMMA4_IMAGE

    patch: int
    pooled: int  # patches along each side of a block that becomes one token
    tokens: int
    whole_blocks: bool = False  # a block is one patch to the tower

    @classmethod
    def of(cls, files: ProcessorFiles) -> Gemma4Processor:
        lengths = (files.vision.get(name) for name in ("default_output_length", "num_soft_tokens"))
        tokens = files.image_config.get("max_soft_tokens") or next(filter(None, lengths), 280)
        return cls(
            int(files.image_config.get("patch_size") or files.vision.get("patch_size", 16)),
            int(files.image_config.get("pooling_kernel_size") or files.vision.get("pooling_kernel_size", 3)),
            int(tokens),
            files.family == "gemma4_unified",
        )

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        tokens = min(self.tokens, GEMMA4_LOW_DETAIL) if layout_options.detail == "low" else self.tokens
        unit = self.patch * self.pooled
        factor = math.sqrt(tokens * unit**2 / size.area)
        columns, rows = (math.floor(factor * side / unit) for side in size)
        if rows == 0:
            columns, rows = min(max(1, size.width // size.height), tokens), 1
        elif columns == 0:
            columns, rows = 1, min(max(1, size.height // size.width), tokens)
        along = 1 if self.whole_blocks else self.pooled
        grid = Grid(1, rows * along, columns * along)
        written = GEMMA4_START + GEMMA4_IMAGE + GEMMA4_END
        return Layout(Size(columns * unit, rows * unit), grid, GEMMA4_IMAGE, written, (rows * columns,))


GLM_START, GLM_IMAGE, GLM_END = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"
PADDLE_START, PADDLE_IMAGE, PADDLE_END = "<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"
MINIMAX_START, MINIMAX_IMAGE, MINIMAX_END = "]<]start of image[>[", "]<]image[>[", "]<]end of image[>["
LOW_DETAIL_PIXELS: Final = 512 * 512


@dataclass(frozen=True, slots=True)
class MergedPatchesProcessor:
    """Of GLM-4.xV, GLM-OCR, MiniMax M3 and PaddleOCR-VL: an image is resized to a multiple of blocks of patches."""

    patch: int
    merge: int
    images: PixelRange
    image_token: str
    whole: str
    counted: int = 1  # how many times an image counts towards its range of pixels
    written: str = ""  # instead of the token alone

    @classmethod
    def of_glm(cls, files: ProcessorFiles) -> MergedPatchesProcessor:
        stated = files.image_config
        patch, merge = int(stated.get("patch_size", 14)), int(stated.get("merge_size", 2))
        images = PixelRange.stated(stated, 112 * 112, 28 * 28 * 15000)
        return cls(patch, merge, images, GLM_IMAGE, GLM_START + GLM_IMAGE + GLM_END, 2)

    @classmethod
    def of_paddle(cls, files: ProcessorFiles) -> MergedPatchesProcessor:
        stated = files.image_config
        patch, merge = int(stated.get("patch_size", 14)), int(stated.get("merge_size", 2))
        images = PixelRange.stated(stated, 147_384, 2_822_400)
        return cls(patch, merge, images, PADDLE_IMAGE, PADDLE_START + PADDLE_IMAGE + PADDLE_END)

    @classmethod
    def of_minimax(cls, files: ProcessorFiles) -> MergedPatchesProcessor:
        """Raises ModelError where sides are limited, and not pixels."""
        stated, size = files.image_config, files.image_config.get("size") or {}
        if stated.get("max_long_side_pixel"):
            raise ModelError("max_long_side_pixel of the image processor's config is not supported.")
        patch, merge = int(stated.get("patch_size", 14)), int(stated.get("merge_size", 2))
        square = size["height"] * size["width"] if {"height", "width"} <= set(size) else 451_584
        whole = MINIMAX_START + MINIMAX_IMAGE + MINIMAX_END
        return cls(patch, merge, PixelRange.stated(stated, 4 * 28 * 28, square), MINIMAX_IMAGE, whole, written=whole)

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(self.image_token, self.written or self.whole)}

    def image_layout(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        most = layout_options.max_pixels
        if layout_options.detail == "low" and most is None:
            most = LOW_DETAIL_PIXELS
        least = layout_options.min_pixels
        allowed = self.images.limited(*(None if each is None else self.counted * each for each in (least, most)))
        unit = self.patch * self.merge
        resized = fit_to_pixels(self._at_least_a_unit(size, unit), unit, allowed, self.counted, self.counted)
        grid = Grid(1, resized.height // self.patch, resized.width // self.patch)
        written = self.written or self.image_token
        return Layout(resized, grid, self.image_token, written, (grid.patches // self.merge**2,))

    def _at_least_a_unit(self, size: Size, unit: int) -> Size:
        if min(size) >= unit:
            return size
        if self.counted > 1:
            scale = max(unit / size.height, unit / size.width)
            return Size(int(size.width * scale), int(size.height * scale))
        width, height = size
        if height < unit:
            width, height = round(width * unit / height), unit
        if width < unit:
            width, height = unit, round(height * unit / width)
        return Size(width, height)

    def video_layout(self, header: VideoHeader, layout_options: VideoLayoutOptions) -> Layout:
        raise Unsupported("The served model does not take video, only its frames as images.")


KIMI_IMAGE: Final = "<|media_pad|>"
KIMI_MOST_ALONG: Final = 512
"""Patches."""


@dataclass(frozen=True, slots=True)
class KimiProcessor(ImagesOnly):
    FAMILY = "Kimi"
    PLACEHOLDER = KIMI_IMAGE

    patch: int
    merge: int
    most: int  # patches
    padded: bool  # to whole blocks of patches; otherwise edges are cut off
    start: str
    fits_side: bool = False  # an image that is too long is made smaller

    @classmethod
    def of(cls, files: ProcessorFiles) -> KimiProcessor:
        is_vl = files.family == "kimi_vl"
        stated = files.image_config.get("media_proc_cfg") or files.image_config
        merge = stated.get("merge_kernel_size") or files.vision.get("merge_kernel_size") or 2
        most = stated.get("in_token_limit") or stated.get("in_patch_limit") or (4096 if is_vl else 16384)
        return cls(
            int(stated.get("patch_size") or files.vision.get("patch_size", 14)),
            int(merge if isinstance(merge, int) else merge[0]),
            int(most),
            bool(stated.get("pad_input", not is_vl)),
            "<|media_start|>" if is_vl else "<|media_begin|>",
            not is_vl,
        )

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        whole = f"{self.start}image<|media_content|>{KIMI_IMAGE}<|media_end|>"
        return {"image": Placeholder(KIMI_IMAGE, whole)}

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        unit = self.patch * self.merge
        resized = self._resized(size, min(self.most, 1024) if layout_options.detail == "low" else self.most)
        if self.padded:
            columns, rows = (-(-side // unit) for side in resized)
        else:
            # What is smaller than a block cannot be cut to one.
            resized = Size(*(max(side, unit) for side in resized))
            columns, rows = (side // unit for side in resized)
        grid = Grid(1, rows * self.merge, columns * self.merge)
        return Layout(resized, grid, KIMI_IMAGE, KIMI_IMAGE, (rows * columns,))

    def _resized(self, size: Size, most: int) -> Size:
        columns, rows = (side // self.patch for side in size)
        scale = math.sqrt(most / (max(1, columns) * max(1, rows)))
        along = KIMI_MOST_ALONG * self.patch
        scale = min(1.0, scale, *((along / side for side in size) if self.fits_side or max(size) > along else ()))
        return Size(*(max(1, min(int(side * scale), along)) for side in size))


LFM_IMAGE, LFM_START, LFM_END, LFM_THUMBNAIL = "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


@dataclass(frozen=True, slots=True)
class LfmProcessor(ImagesOnly):
    FAMILY = "LFM2-VL"
    PLACEHOLDER = LFM_IMAGE

    patch: int
    along: int  # patches along each side of a block that becomes one token
    tokens: tuple[int, int]
    tile: int
    tiles: tuple[int, int]
    tolerance: float
    thumbnail: bool
    marked: bool

    @classmethod
    def of(cls, files: ProcessorFiles) -> LfmProcessor:
        def stated(name: str, default: float) -> float:
            found = files.image_config.get(name, files.config.get(name))
            return default if found is None else float(found)

        patch = stated("encoder_patch_size", float(files.vision.get("patch_size", 16)))
        return cls(
            int(patch),
            int(stated("downsample_factor", 2)),
            (int(stated("min_image_tokens", 64)), int(stated("max_image_tokens", 256))),
            int(stated("tile_size", 512)),
            (int(stated("min_tiles", 2)), int(stated("max_tiles", 10))) if stated("do_image_splitting", 1) else (1, 1),
            stated("max_pixels_tolerance", 2.0),
            bool(stated("use_thumbnail", 1)),
            bool(stated("use_image_special_tokens", 1)),
        )

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        unit = self.patch * self.along
        least, most = (count * unit**2 for count in self.tokens)
        most = min(most, max(least, LOW_DETAIL_PIXELS // 4)) if layout_options.detail == "low" else most
        fitted = fit_to_pixels(self._at_least(size, unit), unit, PixelRange(least, most))
        whole = Grid(1, fitted.height // self.patch, fitted.width // self.patch)
        features = whole.patches // self.along**2
        rounded = [max(self.patch, round(side / unit) * unit) for side in size]
        is_large = layout_options.detail != "low" and math.prod(rounded) > most * self.tolerance
        columns, rows = nearest_arrangement(size, self.tile, self.tiles) if is_large else (1, 1)
        start, end = (LFM_START, LFM_END) if self.marked else ("", "")
        if columns * rows == 1:
            return Layout(fitted, whole, LFM_IMAGE, start + LFM_IMAGE + end, (features,))
        side = self.tile // self.patch
        names = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(rows) for column in range(columns)]
        runs = (-(-side // self.along)) ** 2, features
        parts = [*names, LFM_THUMBNAIL] if self.thumbnail else names
        written = "".join((name if self.marked else "") + LFM_IMAGE for name in parts)
        return Layout(
            Size(columns * self.tile, rows * self.tile),
            Grid(len(names), side, side),
            LFM_IMAGE,
            start + written + end,
            (runs[0],) * len(names) + ((runs[1],) if self.thumbnail else ()),
            apart=whole if self.thumbnail else None,
        )

    @staticmethod
    def _at_least(size: Size, unit: int) -> Size:
        """A side that is not half a unit long is a whole one."""
        return Size(*(unit if round(side / unit) == 0 else side for side in size))


MINICPM_IMAGE: Final = "<|image_pad|>"
MINICPM_OLDER_IMAGE, MINICPM_OLDER_WHOLE = "<unk>", "(<image>./</image>)"


@dataclass(frozen=True, slots=True)
class MiniCpmProcessor(ImagesOnly):
    """The whole image first, and then slices of a larger one, all about as large as a square of `side`."""

    FAMILY = "MiniCPM-V"
    PLACEHOLDER = MINICPM_IMAGE

    patch: int
    side: int
    slices: int
    along: int  # patches along each side of a block that becomes one token
    numbered: bool
    queries: int = 0  # tokens of each slice, whatever its size; 0: of blocks

    @classmethod
    def of(cls, files: ProcessorFiles) -> MiniCpmProcessor:
        stated = files.image_config
        return cls(
            int(stated.get("patch_size", 14)),
            int(stated.get("scale_resolution", 448)),
            int(stated.get("max_slice_nums", 9)) if stated.get("slice_mode", True) else 1,
            4 if stated.get("downsample_mode", "16x") == "16x" else 2,
            bool(stated.get("use_image_id", True)),
        )

    @classmethod
    def of_resampled(cls, files: ProcessorFiles) -> MiniCpmProcessor:
        """Of 2.6 to 4.5, and of MiniCPM-o."""
        queries = files.config.get("query_num") or files.image_config.get("image_feature_size") or 64
        return replace(cls.of(files), queries=int(queries))

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        if self.queries:
            return {"image": Placeholder(MINICPM_OLDER_WHOLE, MINICPM_OLDER_WHOLE + "\n")}
        return {"image": Placeholder(MINICPM_IMAGE, MINICPM_IMAGE)}

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        columns, rows = (1, 1) if layout_options.detail == "low" else self._slices(size)
        token = MINICPM_OLDER_IMAGE if self.queries else MINICPM_IMAGE
        number = f"<image_id>{ITEM_NUMBER}</image_id>" if self.numbered else ""
        written = f"{number}<image>{token}</image>"
        whole = self._fitted(*size, enlarged=columns * rows == 1)
        grid = self._grid(whole, 1)
        runs: tuple[int, ...] = (self._tokens(grid),)
        if columns * rows == 1:
            return Layout(whole, grid, token, written, runs)
        width, height = (
            max(round(side / count) * count, count) / count for side, count in zip(size, (columns, rows), strict=True)
        )
        apart = self._grid(self._fitted(width, height, enlarged=True), columns * rows)
        written += "\n".join([f"<slice>{token}</slice>" * columns] * rows)
        runs += (self._tokens(apart),) * (columns * rows)
        return Layout(whole, grid, token, written, runs, apart=apart, arranged=Size(columns, rows))

    def _tokens(self, grid: Grid) -> int:
        return self.queries or grid.h * grid.w // self.along**2

    def _grid(self, size: Size, count: int) -> Grid:
        return Grid(count, size.height // self.patch, size.width // self.patch)

    def _fitted(self, width: float, height: float, *, enlarged: bool) -> Size:
        if enlarged or width * height > self.side**2:
            ratio = width / max(height, 1)
            height = int(self.side / math.sqrt(max(ratio, 1e-6)))
            width = int(height * ratio)
        unit = self.patch if self.queries else self.patch * 4
        return Size(*(max(round(side / unit) * unit, unit) for side in (width, height)))

    def _slices(self, size: Size) -> tuple[int, int]:
        """Columns and rows whose ratio is nearest to the image's."""
        count = min(math.ceil(size.area / self.side**2), self.slices)
        if count <= 1:
            return 1, 1
        counts = (each for each in (count - 1, count, count + 1) if each != 1 and each <= self.slices)
        every = [(columns, each // columns) for each in counts for columns in range(1, each + 1) if each % columns == 0]
        ratio = math.log(size.width / size.height)
        return min(every, key=lambda each: abs(ratio - math.log(each[0] / each[1])))


LLAMA4_IMAGE, LLAMA4_PATCH = "<|image|>", "<|patch|>"


@dataclass(frozen=True, slots=True)
class Llama4Processor(ImagesOnly):
    FAMILY = "Llama 4"
    PLACEHOLDER = LLAMA4_IMAGE

    side: int
    patch: int
    tokens: int  # of a tile
    tiles: int
    largest: bool  # an image is enlarged as far as its canvas allows

    @classmethod
    def of(cls, files: ProcessorFiles) -> Llama4Processor:
        side = config_side(files.image_config, "size", config_side(files.vision, "image_size", 336))
        patch = int(files.processor.get("patch_size") or files.vision.get("patch_size", 14))
        ratio = float(files.processor.get("pixel_shuffle_ratio") or files.vision.get("pixel_shuffle_ratio", 0.5))
        return cls(
            side,
            patch,
            (side // patch) ** 2 // round(1 / ratio**2),
            int(files.image_config.get("max_patches", 16)),
            bool(files.image_config.get("resize_to_max_canvas", False)),
        )

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        columns, rows = llama4_canvas(
            size, self.side, 1 if layout_options.detail == "low" else self.tiles, self.largest
        )
        along = self.side // self.patch
        line = "<|tile_x_separator|>".join([LLAMA4_PATCH] * columns) + "<|tile_y_separator|>"
        tiles = columns * rows
        whole = f"{LLAMA4_IMAGE}{LLAMA4_PATCH}<|image_end|>"
        written = "<|image_start|>" + (line * rows if tiles > 1 else "") + whole
        shown = tiles + 1 if tiles > 1 else 1
        return Layout(
            self._resized(size, Size(columns * self.side, rows * self.side)),
            Grid(shown, along, along),
            LLAMA4_PATCH,
            written,
            (self.tokens,) * shown,
            arranged=Size(columns, rows),
        )

    def _resized(self, size: Size, canvas: Size) -> Size:
        """As large as the canvas allows, but no larger than a tile unless the image is."""
        if not self.largest:
            canvas = Size(*(min(max(own, self.side), most) for own, most in zip(size, canvas, strict=True)))
        across, down = canvas.width / size.width, canvas.height / size.height
        if across < down:
            return Size(canvas.width, max(1, min(math.floor(size.height * across), canvas.height)))
        return Size(max(1, min(math.floor(size.width * down), canvas.width)), canvas.height)


def float32(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


@lru_cache(maxsize=256)
def llama4_canvas(size: Size, side: int, most: int, largest: bool) -> tuple[int, int]:
    """Columns and rows of tiles: where the image is enlarged least, or else made smaller least, and of those the
    smallest. Scales are compared as its makers do, in float32."""
    every = [(columns, rows) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    scales = [float32(min(columns * side / size.width, rows * side / size.height)) for columns, rows in every]
    enlarging = [scale for scale in scales if scale >= 1]
    chosen = (max if largest else min)(enlarging) if enlarging else max(scales)
    fitting = [each for each, scale in zip(every, scales, strict=True) if scale == chosen]
    return min(fitting, key=math.prod)


DEEPSEEK_IMAGE: Final = "<image>"


@dataclass(frozen=True, slots=True)
class DeepSeekOcrProcessor(ImagesOnly):
    """The whole image on a square, and before it tiles of a larger one."""

    FAMILY = "DeepSeek-OCR"
    PLACEHOLDER = DEEPSEEK_IMAGE

    square: int
    tile: int
    patch: int
    reduced: int  # patches along each side of a block that becomes one token
    tiles: tuple[int, int] = (2, 9)

    @classmethod
    def of(cls, files: ProcessorFiles) -> DeepSeekOcrProcessor:
        stated = {**files.image_config, **files.processor}
        squares = stated.get("candidate_resolutions") or [[1024, 1024]]
        patch, reduced = int(stated.get("patch_size", 16)), int(stated.get("downsample_ratio", 4))
        return cls(int(squares[0][0]), int(stated.get("image_size", 640)), patch, reduced)

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(DEEPSEEK_IMAGE, DEEPSEEK_IMAGE + "\n")}

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        along, inside = (-(-(side // self.patch) // self.reduced) for side in (self.square, self.tile))
        whole = Grid(1, self.square // self.patch, self.square // self.patch)
        features = along * (along + 1) + 1  # a newline feature ends each line, and another one the image
        if layout_options.detail == "low" or max(size) <= self.tile:
            square = Size(self.square, self.square)
            return Layout(square, whole, DEEPSEEK_IMAGE, DEEPSEEK_IMAGE, (features,))
        columns, rows = nearest_arrangement(size, self.tile, self.tiles)
        return Layout(
            Size(columns * self.tile, rows * self.tile),
            Grid(columns * rows, self.tile // self.patch, self.tile // self.patch),
            DEEPSEEK_IMAGE,
            DEEPSEEK_IMAGE,
            (features + rows * inside * (columns * inside + 1),),
            apart=whole,
            arranged=Size(columns, rows),
        )


PHI4_IMAGE: Final = "<image>"
PHI4_TOKEN: Final = "<|dummy_1|>"
"""Its makers put features where the text has <image>, which is no token; this one is never in a text."""


@dataclass(frozen=True, slots=True)
class Phi4Processor(ImagesOnly):
    """Each patch is a token."""

    FAMILY = "Phi 4"
    PLACEHOLDER = PHI4_IMAGE

    patch: int
    patches: tuple[int, int]

    @classmethod
    def of(cls, files: ProcessorFiles) -> Phi4Processor:
        stated = {**files.config, **files.image_config}
        least, most = int(stated.get("min_num_patches", 256)), int(stated.get("max_num_patches", 3600))
        return cls(int(files.image_config.get("patch_size") or files.vision.get("patch_size", 16)), (least, most))

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        return {"image": Placeholder(PHI4_IMAGE, PHI4_IMAGE + "\n")}

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        least, most = self.patches
        if layout_options.detail == "low":
            most = max(least, min(most, LOW_DETAIL_PIXELS // self.patch**2))
        whole = max(1, (size.width // self.patch) * (size.height // self.patch))
        resized = largest_in_patches(size, self.patch, min(max(whole, least), most))
        grid = Grid(1, resized.height // self.patch, resized.width // self.patch)
        return Layout(resized, grid, PHI4_TOKEN, PHI4_TOKEN, (grid.patches,))


@lru_cache(maxsize=256)
def largest_in_patches(size: Size, patch: int, most: int) -> Size:
    """The largest size, by a scale that is found as precisely as SigLIP 2's processor finds it, whose sides are
    rounded up to patches, of at most so many."""

    def scaled(scale: float) -> Size:
        return Size(*(max(1, math.ceil(side * scale / patch)) for side in size))

    fits, beyond = 1e-6, 100.0
    while beyond - fits >= 1e-5:
        middle = (fits + beyond) / 2
        fits, beyond = (middle, beyond) if scaled(middle).area <= most else (fits, middle)
    return Size(*(side * patch for side in scaled(fits)))
