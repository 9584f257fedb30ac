"""Qwen 2, 2.5 and 3 VL and their successors: any size, in patches of which two by two make a token.

Clips are pairs of frames. Qwen 2 and 2.5 give every frame the same budget of pixels and write one run of tokens; from
Qwen 3 on all frames share one budget, and each pair stands behind its time in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ingot.errors import BadMedia
from ingot.media import bounds
from ingot.media.families.files import ProcessorFiles, Stated
from ingot.media.layout import ClipHeader, ClipWish, Grid, Layout, MediaKind, PictureWish, Placeholder
from ingot.media.sampling import near, spread
from ingot.media.size import Size

START, END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
LOW_DETAIL: Final = 512 * 512
TIMED: Final = ("qwen3", "qwen4")


@dataclass(frozen=True, slots=True)
class PixelRange:
    """How many pixels a picture is resized to have."""

    least: int
    most: int

    @classmethod
    def stated(cls, stated: Stated, least: int, most: int) -> PixelRange:
        """`size` calls areas edges; older files say min_pixels and max_pixels."""
        size = stated.get("size") or {}
        low = stated.get("min_pixels") or size.get("shortest_edge") or least
        high = stated.get("max_pixels") or size.get("longest_edge") or most
        return cls(int(low), int(high))

    def asked(self, least: int | None, most: int | None) -> PixelRange:
        """As a request wishes, which may ask for less than the model would take, and not for more."""
        high = self.most if most is None else min(most, self.most)
        low = self.least if least is None else max(least, 1)
        return PixelRange(min(low, high), high)


@dataclass(frozen=True, slots=True)
class Qwen:
    patch: int
    merge: int
    pair: int  # frames that one patch spans
    pictures: PixelRange
    clips: PixelRange
    timed: bool  # each pair of frames behind its time, and one budget for all of them
    fps: float = 2.0
    frames: tuple[int, int] = (4, bounds.FRAMES[1])

    @classmethod
    def of(cls, files: ProcessorFiles) -> Qwen:
        timed = files.family.startswith(TIMED)
        patch = int(files.pictures.get("patch_size", 16 if timed else 14))
        merge = int(files.pictures.get("merge_size", 2))
        unit = (patch * merge) ** 2
        return cls(
            patch,
            merge,
            int(files.pictures.get("temporal_patch_size", 2)),
            PixelRange.stated(files.pictures, 56 * 56, 28 * 28 * 1280),
            PixelRange.stated(files.clips, 128 * unit, 768 * unit),
            timed,
            float(files.clips.get("fps") or 2.0),
            (int(files.clips.get("min_frames", 4)), min(int(files.clips.get("max_frames", 768)), bounds.FRAMES[1])),
        )

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        clip = f"{START}{VIDEO}{END}"
        return {
            "image": Placeholder(IMAGE, f"{START}{IMAGE}{END}"),
            "video": Placeholder(clip if self.timed else VIDEO, clip),
        }

    @property
    def unit(self) -> int:
        """The side of what becomes one token."""
        return self.patch * self.merge

    def picture(self, size: Size, wish: PictureWish) -> Layout:
        most = LOW_DETAIL if wish.detail == "low" and wish.max_pixels is None else wish.max_pixels
        allowed = self.pictures.asked(wish.min_pixels, most)
        resized = fitted(size, self.unit, allowed)
        grid = self._grid(resized, 1)
        return Layout(resized, grid, IMAGE, IMAGE, (grid.patches // self.merge**2,))

    def clip(self, header: ClipHeader, wish: ClipWish) -> Layout:
        shown = near(self._shown(header, wish), header.keys)
        filled = [*shown, *[shown[-1]] * (-len(shown) % self.pair)]  # an odd last frame is shown twice
        resized = self._clip_size(header.size, len(shown), wish)
        grid = self._grid(resized, len(filled) // self.pair)
        steps = range(0, len(filled), self.pair)
        times = tuple((filled[at] + filled[at + self.pair - 1]) / 2 / header.fps for at in steps)
        tokens = grid.h * grid.w // self.merge**2
        if not self.timed:
            interval = self.pair * header.frames / len(shown) / header.fps
            return Layout(resized, grid, VIDEO, VIDEO, (tokens * grid.t,), tuple(filled), times, interval)
        written = "".join(f"<{time:.1f} seconds>{START}{VIDEO}{END}" for time in times)
        return Layout(resized, grid, VIDEO, written, (tokens,) * grid.t, tuple(filled), times)

    def _grid(self, resized: Size, steps: int) -> Grid:
        return Grid(steps, resized.height // self.patch, resized.width // self.patch)

    def _shown(self, header: ClipHeader, wish: ClipWish) -> Sequence[int]:
        total = header.frames
        least, most = self.frames[0], min(self.frames[1], wish.max_frames or self.frames[1], total)
        wanted = header.seconds * (wish.fps or self.fps)
        if wish.frames is not None:
            count = min(wish.frames, most)
        elif self.timed:
            count = min(max(int(wanted), least), most)
        else:
            count = int(min(max(wanted, least), most))
            count = max(count - count % self.pair, 1)
        return spread(total, count) if self.timed else [at * total // count for at in range(count)]

    def _clip_size(self, size: Size, count: int, wish: ClipWish) -> Size:
        if not self.timed:
            most = wish.max_pixels
            if wish.total_pixels is not None:
                most = min(most or self.clips.most, max(1, wish.total_pixels * self.pair // count))
            return fitted(size, self.unit, self.clips.asked(wish.min_pixels, most))
        totals = [wish.total_pixels, None if wish.max_pixels is None else wish.max_pixels * count]
        most = min((total for total in totals if total is not None), default=None)
        least = None if wish.min_pixels is None else wish.min_pixels * count
        shorter = min(size)
        if shorter < self.unit:
            size = Size(*(int(side * self.unit / shorter) for side in size))
        return fitted(size, self.unit, self.clips.asked(least, most), count, round(count / self.pair) * self.pair)


def fitted(size: Size, unit: int, allowed: PixelRange, count: int = 1, rounded: int = 1) -> Size:
    """The nearest size whose sides are multiples of `unit` and whose area, times so many frames, is allowed."""
    if size.aspect > bounds.ASPECT:
        raise BadMedia(f"the longer side is more than {bounds.ASPECT} times the shorter. Cut it.")
    made = Size(*(round(side / unit) * unit for side in size))
    if rounded * made.area > allowed.most:
        shrink = math.sqrt(count * size.area / allowed.most)
        return Size(*(max(unit, math.floor(side / shrink / unit) * unit) for side in size))
    if rounded * made.area < allowed.least:
        grow = math.sqrt(allowed.least / (count * size.area))
        return Size(*(math.ceil(side * grow / unit) * unit for side in size))
    return made
