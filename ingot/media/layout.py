"""How an image or a video is laid out for a model: its size, its patches, and its text in the prompt.

A `MediaProcessor` computes that before any pixel is decoded, by the arithmetic of the model's own processor. Small
files that would become huge images are refused here with BadMedia, before they are decoded. Imports nothing heavy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from ingot.errors import BadMedia
from ingot.media import bounds

MediaKind = Literal["image", "video"]
ImageDetail = Literal["auto", "low", "high"]


ITEM_NUMBER: Final = "\0number\0"
"""Stands in `Layout.written` for an item's number among those of a prompt, from zero on."""


class Grid(NamedTuple):
    """`t` frames, pairs of frames or tiles, each of `h` times `w` patches."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, slots=True)
class Layout:
    """`written` replaces what the template wrote. Each `token` in it is repeated as often as `runs` says, and the
    features of the vision encoder replace these tokens' embeddings, in order."""

    size: Size  # that it is resized to, before it is cut into patches
    grid: Grid
    token: str
    written: str
    runs: tuple[int, ...]
    frames: tuple[int, ...] = (0,)  # the sampled frames of a video
    times: tuple[float, ...] = ()  # of each of `grid.t` in a video, in seconds
    interval: float = 0.0  # seconds between two of `grid.t`, as the model's own processor computes it
    covered: Size | None = None  # the patches that an image covers of its tiles; None: all of them
    apart: Grid | None = None  # of tiles behind those of `grid` that have another one
    arranged: Size | None = None  # columns and rows of tiles
    around: tuple[int, int] = (0, 0)  # tokens before the first run and behind the last that attend to all of it, too
    between: int = 0  # tokens between runs, where those of an image attend to each other

    def __post_init__(self) -> None:
        assert self.written.count(self.token) == len(self.runs), "there must be a run for each token"

    @property
    def features(self) -> int:
        return sum(self.runs)

    @property
    def mutual(self) -> int:
        """Tokens that are computed at once, where those of an image attend to each other."""
        return self.features + self.between + sum(self.around)

    @property
    def grids(self) -> tuple[Grid, ...]:
        return (self.grid,) if self.apart is None else (self.grid, self.apart)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What a chat template writes for an image or video: a layout replaces `sought`; `whole` is written where a
    template has no placeholder."""

    sought: str
    whole: str


@dataclass(frozen=True, slots=True)
class ImageLayoutOptions:
    """A request's options for images. None: the model's own."""

    detail: ImageDetail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class VideoLayoutOptions:
    fps: float | None = None  # frames to sample per second
    max_frames: int | None = None
    frames: int | None = None  # exactly so many, instead of `fps`
    min_pixels: int | None = None  # of a frame
    max_pixels: int | None = None
    total_pixels: int | None = None  # of all frames together
    keyframes: bool = False  # prefer nearby keyframes


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """A video's header. The number of frames may be slightly wrong."""

    size: Size
    frames: int
    fps: float
    keys: tuple[int, ...] = ()  # keyframes to prefer over nearby frames, in order

    @property
    def seconds(self) -> float:
        return self.frames / self.fps


class MediaProcessor(Protocol):
    """Frozen, and equal to another one with the same parameters, all of which its `repr` has: that is part of cache
    keys.

    For any thread. An option that the family does not support raises Unsupported, which names it.
    """

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        """By kind of media that the model takes."""

    def image_layout(self, size: Size, layout_options: ImageLayoutOptions) -> Layout: ...

    def video_layout(self, header: VideoHeader, layout_options: VideoLayoutOptions) -> Layout:
        """Only of models that take video."""


def spread_frames(total: int, count: int) -> list[int]:
    """`count` of a video's frames, from its first to its last, evenly spaced."""
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [round(at * step) for at in range(count - 1)] + [total - 1]


def snap_to_keyframes(frames: Sequence[int], keys: Sequence[int]) -> list[int]:
    """For each frame the nearest keyframe, if it is at most half the spacing of frames away and not taken; otherwise
    the frame itself. All are in order."""
    reach = (frames[-1] - frames[0]) / (2 * max(1, len(frames) - 1))
    found: list[int] = []
    for frame in frames:
        at = bisect_left(keys, frame)
        nearest = min(keys[max(0, at - 1) : at + 1], key=lambda key: abs(key - frame), default=frame)
        close = abs(nearest - frame) <= reach and nearest not in found[-1:]
        found.append(nearest if close else frame)
    return found


class Size(NamedTuple):
    width: int
    height: int

    @property
    def area(self) -> int:
        return self.width * self.height

    @property
    def aspect(self) -> float:
        """The longer side over the shorter."""
        return max(self) / min(self)


def check_image_size(size: Size) -> None:
    """Raises BadMedia for an image that is empty, too large or too narrow."""
    if min(size) < 1:
        raise BadMedia(f"the image is {size.width} by {size.height} pixels, which is empty.")
    if size.area > bounds.PIXELS or max(size) > bounds.SIDE:
        raise BadMedia(
            f"the image is {size.width} by {size.height} pixels; at most {bounds.PIXELS} of them, and {bounds.SIDE} "
            "along a side, are accepted. Send it smaller."
        )
    if size.aspect > bounds.ASPECT:
        raise BadMedia(
            f"the image is {size.width} by {size.height} pixels; its longer side may be at most {bounds.ASPECT} "
            "times the shorter. Crop it."
        )


def check_file_size(count: int) -> None:
    if count > bounds.ITEM_BYTES:
        raise BadMedia(f"the file has {count} bytes; at most {bounds.ITEM_BYTES} are accepted.")
