"""A clip as it was sent: a file, or its frames as pictures. Unpacked only when somebody asks for frames of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, Protocol

from ingot.errors import BadMedia
from ingot.media import bounds, worker
from ingot.media.guard import check_bytes, check_size
from ingot.media.layout import ClipHeader
from ingot.media.picture import BICUBIC, Picture, Pixels, Unpacking, View, pixels_of
from ingot.media.size import Size
from ingot.media.worker import Job

NO_PYAV: Final = "This server cannot unpack clips: its `ingot doctor` says what to install."


class Clip(Protocol):
    @property
    def header(self) -> ClipHeader: ...

    @property
    def keyed(self) -> ClipHeader:
        """The same with its keyframes. Nothing is unpacked for it. Raises BadMedia."""

    @property
    def digest(self) -> bytes:
        """Of what was sent."""

    def unpacking(self, views: Sequence[View]) -> Unpacking: ...

    def pick(self, frames: Sequence[int], *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """Those of these numbers, which do not decrease, each in all views. Where the file has fewer than it said, the
        last stands in."""


@dataclass(frozen=True, slots=True)
class ClipFile:
    data: bytes = field(repr=False)
    header: ClipHeader
    rotation: int  # degrees that frames are turned by, against the clock, to be shown
    digest: bytes

    @classmethod
    def of(cls, data: bytes) -> ClipFile:
        """Raises BadMedia for what is no clip, or too much of one. One frame is unpacked to see how it is turned."""
        check_bytes(len(data))
        worker.require("av", NO_PYAV)
        job = Job("clip header", "clip", bounds.CLIP_MEMORY, bounds.CLIP_CPU_S)
        (width, height), frames, fps, rotation = worker.pixels.run(job, data).value
        size = Size(width, height)
        check_size(size)
        return cls(data, ClipHeader(size, frames, fps), rotation, blake2b(data, digest_size=32).digest())

    @property
    def keyed(self) -> ClipHeader:
        job = Job("clip keys", "clip", bounds.CLIP_MEMORY, bounds.CLIP_CPU_S, (self.header.frames, self.header.fps))
        return replace(self.header, keys=tuple(worker.pixels.run(job, self.data).value))

    def unpacking(self, views: Sequence[View]) -> Unpacking:
        return Unpacking.of(bounds.CLIP_MEMORY, bounds.CLIP_PIXEL, self.header.size, views)

    def pick(self, frames: Sequence[int], *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        said = (self.header.size, self.header.frames, self.header.fps, self.rotation)
        memory = self.unpacking(views).memory
        job = Job("clip frames", "clip", memory, bounds.CLIP_CPU_S, (said, tuple(frames), views, resample))
        return pixels_of(worker.pixels.stream(job, self.data), self.header.size, views)


@dataclass(frozen=True, slots=True)
class ClipFrames:
    """Frames that a client took out of a clip itself, all of one size."""

    pictures: tuple[Picture, ...]
    fps: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.pictures) <= bounds.SENT_FRAMES:
            raise BadMedia(f"a clip has 1 to {bounds.SENT_FRAMES} frames; this one has {len(self.pictures)}.")
        sizes = {picture.size for picture in self.pictures}
        if len(sizes) > 1:
            (one, other) = sorted(sizes)[:2]
            raise BadMedia(
                f"the frames of a clip are of one size; these are of {one.width} by {one.height} and {other.width} by "
                f"{other.height} pixels. Send them as pictures, or resize them."
            )

    @property
    def header(self) -> ClipHeader:
        return ClipHeader(self.pictures[0].size, len(self.pictures), self.fps)

    @property
    def keyed(self) -> ClipHeader:
        """Each of them is a picture of its own."""
        return self.header

    @property
    def digest(self) -> bytes:
        digests = b"".join(picture.digest for picture in self.pictures)
        return blake2b(digests + repr(self.fps).encode(), digest_size=32).digest()

    def unpacking(self, views: Sequence[View]) -> Unpacking:
        return max((picture.unpacking(views) for picture in self.pictures), key=lambda each: each.memory)

    def pick(self, frames: Sequence[int], *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        for number in frames:
            yield from self.pictures[number].frames(*views, resample=resample)


@dataclass(frozen=True, slots=True)
class PickedFrames:
    """Some frames of a clip, as a source of pixels."""

    clip: Clip
    numbers: tuple[int, ...]

    @property
    def size(self) -> Size:
        return self.clip.header.size

    @property
    def digest(self) -> bytes:
        return blake2b(self.clip.digest + repr(self.numbers).encode(), digest_size=32).digest()

    def unpacking(self, views: Sequence[View]) -> Unpacking:
        return self.clip.unpacking(views)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        return self.clip.pick(self.numbers, *views, resample=resample)
