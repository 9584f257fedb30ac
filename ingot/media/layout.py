"""How a picture or a clip is shown to a model: resized to what, cut into what, and what stands for it in the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ingot.media.size import Size

MediaKind = Literal["image", "video"]
Detail = Literal["auto", "low", "high"]


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
class PictureWish:
    """What a request says of how pictures are to be shown. None: as the model's own files say."""

    detail: Detail = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class ClipWish:
    fps: float | None = None  # frames that are shown of a second
    max_frames: int | None = None
    frames: int | None = None  # exactly so many, instead of `fps`
    min_pixels: int | None = None  # of a frame
    max_pixels: int | None = None
    total_pixels: int | None = None  # of all frames together
    keyframes: bool = False  # rather than frames between them, where they are near


@dataclass(frozen=True, slots=True)
class ClipHeader:
    """What a clip's file says of it. How many frames there are may be wrong by some."""

    size: Size
    frames: int
    fps: float
    keys: tuple[int, ...] = ()  # frames that are to be shown rather than those near them, in order

    @property
    def seconds(self) -> float:
        return self.frames / self.fps
