"""The image processors of the known vision families, configured by a checkpoint's files. Newer checkpoints have
everything in processor_config.json.

Each is the arithmetic of a family's own processor: from the size of an image to the size that it is resized to, its
tiles, and its text in the prompt. A family is one class and one line in PROCESSORS. Only Qwen's take video; others get
frames as images. An option that a family does not support raises Unsupported, which names it. Imports nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ingot.media import bounds
from ingot.media.any_size_processors import (
    DeepSeekOcrProcessor,
    Gemma4Processor,
    KimiProcessor,
    LfmProcessor,
    Llama4Processor,
    MergedPatchesProcessor,
    MiniCpmProcessor,
    Phi4Processor,
    float32,
)
from ingot.media.layout import (
    Grid,
    ImageLayoutOptions,
    Layout,
    MediaKind,
    MediaProcessor,
    Placeholder,
    Size,
    VideoHeader,
    VideoLayoutOptions,
    snap_to_keyframes,
    spread_frames,
)
from ingot.media.processor_parts import (
    ImagesOnly,
    PixelRange,
    ProcessorFiles,
    config_side,
    fit_to_pixels,
    nearest_arrangement,
)

QWEN_START, QWEN_END = "<|vision_start|>", "<|vision_end|>"
QWEN_IMAGE, QWEN_VIDEO = "<|image_pad|>", "<|video_pad|>"
QWEN_LOW_DETAIL: Final = 512 * 512
TIMED_FAMILIES: Final = ("qwen3", "qwen4")


@dataclass(frozen=True, slots=True)
class QwenProcessor:
    patch: int
    merge: int
    pair: int  # frames that one patch spans
    images: PixelRange
    videos: PixelRange
    timed: bool  # each pair of frames follows its timestamp, and all share one budget of pixels
    fps: float = 2.0
    frames: tuple[int, int] = (4, bounds.FRAMES[1])

    @classmethod
    def of(cls, files: ProcessorFiles) -> QwenProcessor:
        timed = files.family.startswith(TIMED_FAMILIES)
        patch = int(files.image_config.get("patch_size", 16 if timed else 14))
        merge = int(files.image_config.get("merge_size", 2))
        unit = (patch * merge) ** 2
        return cls(
            patch,
            merge,
            int(files.image_config.get("temporal_patch_size", 2)),
            PixelRange.stated(files.image_config, 56 * 56, 28 * 28 * 1280),
            PixelRange.stated(files.video_config, 128 * unit, 768 * unit),
            timed,
            float(files.video_config.get("fps") or 2.0),
            (
                int(files.video_config.get("min_frames", 4)),
                min(int(files.video_config.get("max_frames", 768)), bounds.FRAMES[1]),
            ),
        )

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        video = f"{QWEN_START}{QWEN_VIDEO}{QWEN_END}"
        return {
            "image": Placeholder(QWEN_IMAGE, f"{QWEN_START}{QWEN_IMAGE}{QWEN_END}"),
            "video": Placeholder(video if self.timed else QWEN_VIDEO, video),
        }

    @property
    def unit(self) -> int:
        """The side of the square that becomes one token."""
        return self.patch * self.merge

    def image_layout(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        most = layout_options.max_pixels
        if layout_options.detail == "low" and most is None:
            most = QWEN_LOW_DETAIL
        resized = fit_to_pixels(size, self.unit, self.images.limited(layout_options.min_pixels, most))
        grid = self._grid(resized, 1)
        return Layout(resized, grid, QWEN_IMAGE, QWEN_IMAGE, (grid.patches // self.merge**2,))

    def video_layout(self, header: VideoHeader, layout_options: VideoLayoutOptions) -> Layout:
        sampled = snap_to_keyframes(self._sampled_frames(header, layout_options), header.keys)
        frames = (*sampled, *[sampled[-1]] * (-len(sampled) % self.pair))  # an odd last frame is repeated
        resized = self._video_size(header.size, len(sampled), layout_options)
        grid = self._grid(resized, len(frames) // self.pair)
        steps = range(0, len(frames), self.pair)
        times = tuple((frames[at] + frames[at + self.pair - 1]) / 2 / header.fps for at in steps)
        tokens = grid.h * grid.w // self.merge**2
        if not self.timed:
            interval = self.pair * header.frames / len(sampled) / header.fps
            return Layout(resized, grid, QWEN_VIDEO, QWEN_VIDEO, (tokens * grid.t,), frames, times, interval)
        written = "".join(f"<{time:.1f} seconds>{QWEN_START}{QWEN_VIDEO}{QWEN_END}" for time in times)
        return Layout(resized, grid, QWEN_VIDEO, written, (tokens,) * grid.t, frames, times)

    def _grid(self, resized: Size, steps: int) -> Grid:
        return Grid(steps, resized.height // self.patch, resized.width // self.patch)

    def _sampled_frames(self, header: VideoHeader, layout_options: VideoLayoutOptions) -> Sequence[int]:
        total = header.frames
        least, most = self.frames[0], min(self.frames[1], layout_options.max_frames or self.frames[1], total)
        by_rate = header.seconds * (layout_options.fps or self.fps)
        if layout_options.frames is not None:
            count = min(layout_options.frames, most)
        elif self.timed:
            count = min(max(int(by_rate), least), most)
        else:
            count = int(min(max(by_rate, least), most))
            count = max(count - count % self.pair, 1)
        return spread_frames(total, count) if self.timed else [at * total // count for at in range(count)]

    def _video_size(self, size: Size, count: int, layout_options: VideoLayoutOptions) -> Size:
        if not self.timed:
            most = layout_options.max_pixels
            if layout_options.total_pixels is not None:
                most = min(most or self.videos.most, max(1, layout_options.total_pixels * self.pair // count))
            return fit_to_pixels(size, self.unit, self.videos.limited(layout_options.min_pixels, most))
        totals = [
            layout_options.total_pixels,
            None if layout_options.max_pixels is None else layout_options.max_pixels * count,
        ]
        most = min((total for total in totals if total is not None), default=None)
        least = None if layout_options.min_pixels is None else layout_options.min_pixels * count
        shorter = min(size)
        if shorter < self.unit:
            size = Size(*(int(side * self.unit / shorter) for side in size))
        allowed = self.videos.limited(least, most)
        return fit_to_pixels(size, self.unit, allowed, count, round(count / self.pair) * self.pair)


GEMMA_START, GEMMA_SOFT, GEMMA_END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True, slots=True)
class GemmaProcessor(ImagesOnly):
    FAMILY = "Gemma 3"
    PLACEHOLDER = GEMMA_START

    side: int
    patch: int
    tokens: int
    embeds_end: bool = False  # Gemma 3n's tower has a feature for the token behind an image, too

    @classmethod
    def of(cls, files: ProcessorFiles) -> GemmaProcessor:
        lengths = (stated.get("image_seq_length") for stated in (files.processor, files.image_config))
        side = config_side(files.image_config, "size", config_side(files.vision, "image_size", 896))
        tokens = next(filter(None, lengths), files.config.get("vision_soft_tokens_per_image", 256))
        return cls(side, int(files.vision.get("patch_size", 14)), int(tokens))

    @classmethod
    def of_3n(cls, files: ProcessorFiles) -> GemmaProcessor:
        side = config_side(files.image_config, "size", 768)
        return replace(cls.of(files), side=side, patch=int(files.vision.get("patch_size", 16)), embeds_end=True)

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        sought = GEMMA_SOFT if self.embeds_end else GEMMA_START
        return {"image": Placeholder(sought, sought)}

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        along = self.side // self.patch
        written = f"\n\n{GEMMA_START}{GEMMA_SOFT}{'' if self.embeds_end else GEMMA_END}\n\n"
        features = self.tokens + self.embeds_end
        return Layout(Size(self.side, self.side), Grid(1, along, along), GEMMA_SOFT, written, (features,))


PIXTRAL_IMAGE, PIXTRAL_BREAK, PIXTRAL_END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
PIXTRAL_LOW_DETAIL = 512


@dataclass(frozen=True, slots=True)
class PixtralProcessor(ImagesOnly):
    FAMILY = "Pixtral"
    PLACEHOLDER = PIXTRAL_IMAGE

    longest: int
    patch: int
    merge: int

    @classmethod
    def of(cls, files: ProcessorFiles) -> PixtralProcessor:
        patch = files.processor.get("patch_size") or config_side(files.image_config, "patch_size", 16)
        merge = files.processor.get("spatial_merge_size") or files.config.get("spatial_merge_size") or 1
        return cls(config_side(files.image_config, "size", 1024), int(patch), int(merge))

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        longest = min(self.longest, PIXTRAL_LOW_DETAIL) if layout_options.detail == "low" else self.longest
        ratio = max(size) / longest
        if ratio > 1:
            size = Size(*(max(1, math.floor(side / ratio)) for side in size))
        unit = self.patch * self.merge
        columns, rows = -(-size.width // unit), -(-size.height // unit)
        written = (PIXTRAL_IMAGE + PIXTRAL_BREAK) * (rows - 1) + PIXTRAL_IMAGE + PIXTRAL_END
        grid = Grid(1, rows * self.merge, columns * self.merge)
        return Layout(Size(columns * unit, rows * unit), grid, PIXTRAL_IMAGE, written, (columns,) * rows)


IDEFICS_IMAGE, IDEFICS_AROUND, IDEFICS_WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
IDEFICS_LONGEST: Final = 4096


@dataclass(frozen=True, slots=True)
class IdeficsProcessor(ImagesOnly):
    FAMILY = "Idefics 3"
    PLACEHOLDER = IDEFICS_IMAGE

    longest: int  # side that every image is resized to
    tile: int
    patch: int
    tokens: int  # of a tile
    tiled: bool = True

    @classmethod
    def of(cls, files: ProcessorFiles) -> IdeficsProcessor:
        tile = config_side(files.image_config, "max_image_size", 364)
        patch = int(files.vision.get("patch_size", 14))
        scale = int(files.config.get("scale_factor", 2))
        tokens = files.processor.get("image_seq_len") or (tile // patch) ** 2 // scale**2
        longest = config_side(files.image_config, "size", 4 * tile)
        return cls(longest, tile, patch, int(tokens), bool(files.image_config.get("do_image_splitting", True)))

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        along = self.tile // self.patch
        if not self.tiled or layout_options.detail == "low":
            return self._layout(Size(self.tile, self.tile), 0, 0, along)
        resized = self._in_tiles(self.enlarged(size))
        rows, columns = resized.height // self.tile, resized.width // self.tile
        if (rows, columns) == (1, 1):
            rows = columns = 0
        return self._layout(resized, rows, columns, along)

    def _layout(self, resized: Size, rows: int, columns: int, along: int) -> Layout:
        lines = "".join(
            "".join(f"{IDEFICS_AROUND}<row_{row}_col_{column}>{IDEFICS_IMAGE}" for column in range(1, columns + 1))
            + "\n"
            for row in range(1, rows + 1)
        )
        written = f"{lines}{chr(10) if lines else ''}{IDEFICS_AROUND}{IDEFICS_WHOLE}{IDEFICS_IMAGE}{IDEFICS_AROUND}"
        tiles = rows * columns + 1
        return Layout(resized, Grid(tiles, along, along), IDEFICS_IMAGE, written, (self.tokens,) * tiles)

    def enlarged(self, size: Size) -> Size:
        """The longer side as long as is stated, the shorter even, and neither beyond what any model takes."""
        aspect = size.width / size.height
        if size.width >= size.height:
            width, height = self.longest, int(self.longest / aspect)
            height += height % 2
        else:
            width, height = int(self.longest * aspect), self.longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        aspect = width / height
        if width >= height and width > IDEFICS_LONGEST:
            width, height = IDEFICS_LONGEST, int(IDEFICS_LONGEST / aspect)
        elif height > width and height > IDEFICS_LONGEST:
            width, height = int(IDEFICS_LONGEST * aspect), IDEFICS_LONGEST
        return Size(max(width, 1), max(height, 1))

    def _in_tiles(self, size: Size) -> Size:
        aspect = size.width / size.height
        if size.width >= size.height:
            width = self._tiled(size.width)
            return Size(width, self._tiled(int(width / aspect)))
        height = self._tiled(size.height)
        return Size(self._tiled(int(height * aspect)), height)

    def _tiled(self, side: int) -> int:
        return math.ceil(side / self.tile) * self.tile


INTERNVL_IMAGE, INTERNVL_START, INTERNVL_END = "<IMG_CONTEXT>", "<img>", "</img>"


@dataclass(frozen=True, slots=True)
class InternVLProcessor(ImagesOnly):
    FAMILY = "InternVL"
    PLACEHOLDER = INTERNVL_IMAGE

    side: int
    patch: int
    tokens: int  # of a tile
    tiles: tuple[int, int]

    @classmethod
    def of(cls, files: ProcessorFiles) -> InternVLProcessor:
        side = config_side(files.image_config, "size", config_side(files.vision, "image_size", 448))
        patch = config_side(files.vision, "patch_size", 14)
        ratio = float(files.config.get("downsample_ratio", 0.5))
        tokens = files.processor.get("image_seq_length") or int((side // patch) ** 2 * ratio**2)
        cropped = files.image_config.get("crop_to_patches", True)
        most = files.image_config.get("max_patches") or files.config.get("max_dynamic_patch") or 12
        least = files.image_config.get("min_patches") or files.config.get("min_dynamic_patch") or 1
        return cls(side, patch, int(tokens), (int(least), int(most)) if cropped else (1, 1))

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        single = layout_options.detail == "low" or self.tiles[1] == 1
        columns, rows = (1, 1) if single else nearest_arrangement(size, self.side, self.tiles)
        tiles = columns * rows
        shown = tiles + 1 if tiles > 1 else 1
        along = self.side // self.patch
        resized = Size(columns * self.side, rows * self.side)
        return Layout(
            resized,
            Grid(shown, along, along),
            INTERNVL_IMAGE,
            INTERNVL_START + INTERNVL_IMAGE + INTERNVL_END,
            (self.tokens * shown,),
        )


LLAVA_IMAGE = "<image>"


@dataclass(frozen=True, slots=True)
class LlavaProcessor(ImagesOnly):
    FAMILY = "LLaVA"
    PLACEHOLDER = LLAVA_IMAGE

    side: int
    patch: int
    further: int  # features in addition to those of patches
    canvases: tuple[Size, ...] = ()  # made up of tiles; none: only the square

    @classmethod
    def of(cls, files: ProcessorFiles) -> LlavaProcessor:
        patch = files.processor.get("patch_size") or files.vision.get("patch_size", 14)
        side = config_side(files.image_config, "crop_size", config_side(files.vision, "image_size", 336))
        strategy = files.processor.get("vision_feature_select_strategy") or files.config.get(
            "vision_feature_select_strategy", "default"
        )
        extra = files.processor.get("num_additional_image_tokens")
        # By default the tower has one feature for the whole image (CLS), which the strategy "default" leaves out.
        further = (1 if extra is None else int(extra)) - (strategy == "default")
        canvases: tuple[Size, ...] = ()
        if files.family == "llava_next":
            stated = files.image_config.get("image_grid_pinpoints") or files.config.get("image_grid_pinpoints") or ()
            canvases = tuple(Size(width, height) for height, width in stated)
        return cls(side, int(patch), further, canvases)

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        along = self.side // self.patch
        base = along * along + self.further
        if not self.canvases or layout_options.detail == "low":
            return Layout(Size(self.side, self.side), Grid(1, along, along), LLAVA_IMAGE, LLAVA_IMAGE, (base,))
        canvas = best_canvas(size, self.canvases)
        columns, rows = canvas.width // self.side, canvas.height // self.side
        covered = covered_patches(size, Size(columns * along, rows * along))
        features = base + covered.area + covered.height  # every line ends in a newline feature
        grid = Grid(columns * rows + 1, along, along)
        return Layout(canvas, grid, LLAVA_IMAGE, LLAVA_IMAGE, (features,), covered=covered)


def best_canvas(size: Size, canvases: Iterable[Size]) -> Size:
    """The canvas with the highest resolution of the image, and of those the one with the least padding."""

    def rank(canvas: Size) -> tuple[int, int]:
        scale = min(canvas.width / size.width, canvas.height / size.height)
        effective = min(int(size.width * scale) * int(size.height * scale), size.area)
        return effective, effective - canvas.area

    return max(canvases, key=rank)


def covered_patches(size: Size, patches: Size) -> Size:
    """The patches of a canvas that the image covers."""
    if size.width / size.height > patches.width / patches.height:
        height = int(round(size.height * (patches.width / size.width), 7))
        return Size(patches.width, patches.height - (patches.height - height) // 2 * 2)
    width = int(round(size.width * (patches.height / size.height), 7))
    return Size(patches.width - (patches.width - width) // 2 * 2, patches.height)


PHI_IMAGE = "<|image|>"


@dataclass(frozen=True, slots=True)
class Phi3Processor(ImagesOnly):
    """A tile of 336 pixels is 12 by 12 features, and each line of them ends in a newline feature."""

    FAMILY = "Phi 3.5"
    PLACEHOLDER = PHI_IMAGE

    tiles: int
    side: int = 336
    along: int = 12

    @classmethod
    def of(cls, files: ProcessorFiles) -> Phi3Processor:
        return cls(int(files.image_config.get("num_crops", 16)))

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        columns, rows = self._arrangement(size, 1 if layout_options.detail == "low" else self.tiles)
        tiles = columns * rows
        features = (tiles + 1) * self.along**2 + 1 + (rows + 1) * self.along
        resized = Size(columns * self.side, rows * self.side)
        return Layout(resized, Grid(tiles + 1, 2 * self.along, 2 * self.along), PHI_IMAGE, PHI_IMAGE, (features,))

    def _arrangement(self, size: Size, most: int) -> tuple[int, int]:
        """Columns and rows: as many tiles along the longer side as fit with their share along the shorter."""
        ratio = max(size) / min(size)
        along = 1
        while (along + 1) * math.ceil((along + 1) / ratio) <= most:
            along += 1
        across = math.ceil(int(along * self.side / ratio) / self.side)
        return (along, across) if size.width >= size.height else (across, along)


MOLMO_IMAGE, MOLMO_TOKEN, MOLMO_END = "<|image|>", "<im_patch>", "<im_end>"
MOLMO_POOLED: Final = 2
"""Patches along each side of a block that becomes one token."""


@dataclass(frozen=True, slots=True)
class MolmoProcessor(ImagesOnly):
    """The whole image on a square, and then crops of a canvas, which overlap. Tokens are those of the canvas, without
    what crops see twice."""

    FAMILY = "Molmo"
    PLACEHOLDER = MOLMO_IMAGE

    side: int
    patch: int
    crops: int
    margins: tuple[int, int]  # patches at a crop's edges that its neighbours see, too
    start: str  # of the whole image
    fitted: bool = False  # to the canvas, with black edges; otherwise (2) stretched, and its tokens see each other
    ends: tuple[bool, bool] = (True, True)  # whether a token ends the lines of the whole image, and of the canvas

    @classmethod
    def of(cls, files: ProcessorFiles) -> MolmoProcessor:
        stated = files.image_config
        return cls(
            int((stated.get("base_image_input_size") or [336])[0]),
            int(stated.get("image_patch_size", 14)),
            int(stated.get("max_crops", 12)),
            cls._margins(stated.get("overlap_margins")),
            "<im_start>",
            fitted=True,
        )

    @classmethod
    def of_2(cls, files: ProcessorFiles) -> MolmoProcessor:
        stated, named = files.image_config, files.processor
        ends = bool(named.get("image_use_col_tokens", True))
        whole_ends = named.get("use_single_crop_col_tokens")
        return cls(
            config_side(stated, "size", 378),
            int(stated.get("patch_size", 14)),
            int(stated.get("max_crops", 8)),
            cls._margins(stated.get("overlap_margins")),
            "<low_res_im_start>" if named.get("use_single_crop_start_token", True) else "<im_start>",
            ends=(ends if whole_ends is None else bool(whole_ends), ends),
        )

    @staticmethod
    def _margins(stated: Sequence[int] | None) -> tuple[int, int]:
        left, right = stated or (4, 4)
        return int(left), int(right)

    @property
    def along(self) -> int:
        """Patches along a side of a crop."""
        return self.side // self.patch

    def canvas(self, arranged: Size) -> Size:
        """The size, in patches, of so many columns and rows of crops."""
        window = self.along - sum(self.margins)
        return Size(*(count * window + sum(self.margins) for count in arranged))

    def fit(self, size: Size, canvas: Size) -> Size:
        """The largest size on a canvas, computed in float32 as the family's own processor does."""
        scale = min(float32(most / side) for side, most in zip(size, canvas, strict=True))
        return Size(*(max(1, int(float32(side * scale))) for side in size))

    def _image(self, size: Size, layout_options: ImageLayoutOptions) -> Layout:
        crops = 1 if layout_options.detail == "low" else self.crops
        margin = sum(self.margins) * self.patch
        inner = size.width - margin, size.height - margin
        arranged = molmo_arrangement(*inner, self.side - margin, crops)
        patches = self.canvas(arranged)
        canvas = Size(*(self.patch * count for count in patches))
        whole, lines = self._lines(self.along, self.along, self.ends[0]), self._lines(*patches, self.ends[1])
        written, runs = f"{self.start}{whole[0]}{MOLMO_END}<im_start>{lines[0]}{MOLMO_END}", whole[1] + lines[1]
        around = (0, 0) if self.fitted else (1, 2 if self.ends[1] else 1)
        return Layout(
            self.fit(size, canvas) if self.fitted else canvas,
            Grid(arranged.area + 1, self.along, self.along),
            MOLMO_TOKEN,
            written,
            runs,
            arranged=arranged,
            around=around,
            between=0 if self.fitted else written.count("<") - len(runs) - sum(around),
        )

    @staticmethod
    def _lines(columns: int, rows: int, ends: bool) -> tuple[str, tuple[int, ...]]:
        """What is written for so many patches, and its runs."""
        across, down = (-(-count // MOLMO_POOLED) for count in (columns, rows))
        return ((MOLMO_TOKEN + "<im_col>") * down, (across,) * down) if ends else (MOLMO_TOKEN, (across * down,))


@lru_cache(maxsize=256)
def molmo_arrangement(width: int, height: int, window: int, most: int) -> Size:
    """Columns and rows of at most so many crops: of those that the image is enlarged for least, or else made smaller
    for least, the fewest, and then the fewest rows. An image may be narrower than its margins."""

    def scale(count: int, side: int) -> float:
        return float32(count * window / side) if side else math.inf

    every = sorted(
        (rows * columns, rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)
    )
    scales = {each: min(scale(each[1], height), scale(each[2], width)) for each in every}
    enlarging = [each for each in every if scales[each] >= 1]
    _, rows, columns = min(enlarging, key=scales.__getitem__) if enlarging else max(every, key=scales.__getitem__)
    return Size(columns, rows)


PROCESSORS: Final[Mapping[str, Callable[[ProcessorFiles], MediaProcessor]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), QwenProcessor.of),
    "gemma3": GemmaProcessor.of,
    "gemma3n": GemmaProcessor.of_3n,
    **dict.fromkeys(("pixtral", "mistral3"), PixtralProcessor.of),
    **dict.fromkeys(("idefics3", "smolvlm"), IdeficsProcessor.of),
    **dict.fromkeys(("internvl", "internvl_chat"), InternVLProcessor.of),
    **dict.fromkeys(("llava", "llava_next"), LlavaProcessor.of),
    "phi3_v": Phi3Processor.of,
    **dict.fromkeys(("gemma4", "gemma4_unified"), Gemma4Processor.of),
    "minimax_m3_vl": MergedPatchesProcessor.of_minimax,
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), MergedPatchesProcessor.of_glm),
    "minicpmv4_6": MiniCpmProcessor.of,
    **dict.fromkeys(("minicpmo", "minicpmv"), MiniCpmProcessor.of_resampled),
    "paddleocr_vl": MergedPatchesProcessor.of_paddle,
    **dict.fromkeys(("kimi_vl", "kimi_k25"), KimiProcessor.of),
    **dict.fromkeys(("lfm2_vl", "lfm2-vl"), LfmProcessor.of),
    "deepseekocr": DeepSeekOcrProcessor.of,
    "phi4-siglip": Phi4Processor.of,
    "llama4": Llama4Processor.of,
    "molmo": MolmoProcessor.of,
    "molmo2": MolmoProcessor.of_2,
}
"""By model_type."""


def states_vision(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a model with a vision tower. Molmo's makers state none: each has the same."""
    parts = ("vision_config", "vit_config", "img_processor")
    return config.get("model_type") == "molmo" or any(isinstance(config.get(part), Mapping) for part in parts)


def read_processor(folder: Path) -> MediaProcessor | None:
    """The processor of a checkpoint; None for an unknown family. Raises ModelError."""
    files = ProcessorFiles.read(folder)
    make = PROCESSORS.get(files.family)
    return None if make is None else make(files)
