"""How an image or a video is shown to a model: resized to what, cut into what, and what stands for it in the prompt.

A `Processor` says so before any pixel is decoded: the rules of the model's own processor, as arithmetic. What is
refused before anything is decoded is refused here with BadMedia: files that are small and become huge. Imports nothing
heavy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from ingot.errors import BadMedia
from ingot.media import bounds

MediaKind = Literal["image", "video"]
ImageDetail = Literal["auto", "low", "high"]


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
    """In `written`, which takes the place of what the template wrote, each `token` stands for a run of them: how long
    each run is, `runs` says. Features of the vision tower replace those tokens' embeddings, in order."""

    size: Size  # that it is resized to, before it is cut
    grid: Grid
    token: str
    written: str
    runs: tuple[int, ...]
    frames: tuple[int, ...] = (0,)  # which of a clip's are shown
    times: tuple[float, ...] = ()  # where in a clip each of `grid.t` stands, in seconds
    interval: float = 0.0  # seconds between two of `grid.t`, as the model's own processor counts them
    covered: Size | None = None  # in patches, what a picture covers of its tiles; None: all of them

    def __post_init__(self) -> None:
        assert self.written.count(self.token) == len(self.runs), "a run for each place, and a place for each run"

    @property
    def features(self) -> int:
        return sum(self.runs)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What a chat template writes for one picture or clip: `sought` is what a layout replaces in it, `whole` what is
    written where a template has no place for it."""

    sought: str
    whole: str


@dataclass(frozen=True, slots=True)
class ImageLayoutOptions:
    """What a request says of how pictures are to be shown. None: as the model's own files say."""

    detail: ImageDetail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class VideoLayoutOptions:
    fps: float | None = None  # frames that are shown of a second
    max_frames: int | None = None
    frames: int | None = None  # exactly so many, instead of `fps`
    min_pixels: int | None = None  # of a frame
    max_pixels: int | None = None
    total_pixels: int | None = None  # of all frames together
    keyframes: bool = False  # rather than frames between them, where they are near


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What a clip's file says of it. How many frames there are may be wrong by some."""

    size: Size
    frames: int
    fps: float
    keys: tuple[int, ...] = ()  # frames that are to be shown rather than those near them, in order

    @property
    def seconds(self) -> float:
        return self.frames / self.fps


class MediaProcessor(Protocol):
    """Frozen, and equal to another of the same rules: `repr` of one names them all, for keys of what is computed.

    Any thread may ask. A wish that the family has no rule for raises Unsupported, which names it.
    """

    @property
    def placeholders(self) -> dict[MediaKind, Placeholder]:
        """What is written for each kind that the model takes; it takes no others."""

    def picture(self, size: Size, layout_options: ImageLayoutOptions) -> Layout: ...

    def clip(self, header: VideoHeader, layout_options: VideoLayoutOptions) -> Layout:
        """Only of models that take clips as such."""


def spread_frames(total: int, count: int) -> list[int]:
    """So many of a clip's frames, from its first to its last, as evenly as can be."""
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [round(at * step) for at in range(count - 1)] + [total - 1]


def snap_to_keyframes(frames: Sequence[int], keys: Sequence[int]) -> list[int]:
    """Of each frame the nearest of `keys`, where that is no further away than half of what frames are apart; else the
    frame itself. Both are in order, and so are the found; no two frames become one."""
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
    """Raises BadMedia for what has no area, more than memory is lent for, or no sensible shape."""
    if min(size) < 1:
        raise BadMedia(f"the picture is {size.width} by {size.height} pixels, which is nothing.")
    if size.area > bounds.PIXELS or max(size) > bounds.SIDE:
        raise BadMedia(
            f"the picture is {size.width} by {size.height} pixels; at most {bounds.PIXELS} of them, and {bounds.SIDE} "
            "along a side, are taken. Send it smaller."
        )
    if size.aspect > bounds.ASPECT:
        raise BadMedia(
            f"the picture is {size.width} by {size.height} pixels; its longer side may be at most {bounds.ASPECT} "
            "times the shorter. Cut it."
        )


def check_file_size(count: int) -> None:
    if count > bounds.ITEM_BYTES:
        raise BadMedia(f"the file has {count} bytes; at most {bounds.ITEM_BYTES} are taken.")
