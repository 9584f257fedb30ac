"""What requests say of how pictures and clips are to be shown, in the words of several servers and clients."""

# ruff: noqa: RUF009  (`accepts` and its like are dataclasses.field with a kind in its metadata)
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from ingot.media import bounds
from ingot.media.layout import ClipWish, PictureWish
from ingot.protocol.schema.fields import Bool, Int, Number, OneOf
from ingot.protocol.schema.objects import ObjectOf, accepts

DETAIL: Final = OneOf(("auto", "low", "high"))
ABOUT_DETAIL = "How finely it is shown; `low` takes few tokens. By default as the model's makers say."
ABOUT_KEYFRAMES = (
    "Show the keyframe nearest to each frame instead, where one is no further away than half of what frames are apart. "
    "Long clips are unpacked many times as fast."
)
PIXELS: Final = Int(bounds.PIXEL_LIMIT)
TOTAL_PIXELS: Final = Int((1, bounds.PIXELS * bounds.FRAMES[1]))
FRAMES: Final = Int(bounds.FRAMES)
RATE: Final = Number(bounds.FPS)


@dataclass(frozen=True, slots=True)
class MediaWishes:
    """What holds where a picture or a clip does not say otherwise itself."""

    picture: PictureWish = PictureWish()
    clip: ClipWish = ClipWish()


def told(wish: Any, **said: Any) -> Any:
    """A wish with what is said besides."""
    return replace(wish, **{name: value for name, value in said.items() if value is not None})


@dataclass(frozen=True, slots=True)
class ProcessorWishes:
    """vLLM's `mm_processor_kwargs`."""

    min_pixels: int | None = accepts(PIXELS, "Least pixels that a picture or frame is resized to.")
    max_pixels: int | None = accepts(PIXELS, "Most pixels of one.")
    total_pixels: int | None = accepts(TOTAL_PIXELS, "Most pixels of all frames of a clip together.")
    fps: float | None = accepts(RATE, "Frames that are shown of a second of a clip.")
    max_frames: int | None = accepts(FRAMES, "Most frames of a clip.")
    num_frames: int | None = accepts(FRAMES, "Exactly so many frames of a clip.")


@dataclass(frozen=True, slots=True)
class ClipReading:
    num_frames: int | None = accepts(FRAMES, "Exactly so many frames of a clip.")
    fps: float | None = accepts(RATE, "Frames that are shown of a second of a clip.")
    keyframes: bool | None = accepts(Bool(), ABOUT_KEYFRAMES)


@dataclass(frozen=True, slots=True)
class MediaReading:
    """vLLM's `media_io_kwargs`."""

    video: ClipReading | None = accepts(ObjectOf(ClipReading), "How clips are read.")


def media_wishes(
    processor: ProcessorWishes | None, reading: MediaReading | None, fps: float | None, max_frames: int | None
) -> MediaWishes:
    """What several fields say together; of two that say the same thing, the more particular one counts."""
    said = processor or ProcessorWishes()
    clip = (reading.video if reading is not None else None) or ClipReading()
    return MediaWishes(
        PictureWish("auto", said.min_pixels, said.max_pixels),
        ClipWish(
            fps=fps or clip.fps or said.fps,
            max_frames=max_frames or said.max_frames,
            frames=clip.num_frames or said.num_frames,
            min_pixels=said.min_pixels,
            max_pixels=said.max_pixels,
            total_pixels=said.total_pixels,
            keyframes=bool(clip.keyframes),
        ),
    )
