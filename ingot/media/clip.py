"""A clip as it was sent: a file, or its frames as pictures. Unpacked only when somebody asks for frames of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from ingot.errors import BadMedia
from ingot.media import bounds
from ingot.media.clip_packets import ClipPackets
from ingot.media.guard import check_bytes
from ingot.media.layout import ClipHeader
from ingot.media.picture import Picture
from ingot.media.size import Size

if TYPE_CHECKING:
    from ingot.media.decoding import Pixels


class Clip(Protocol):
    @property
    def header(self) -> ClipHeader: ...

    @property
    def keyed(self) -> ClipHeader:
        """The same with its keyframes. Nothing is unpacked for it. Raises BadMedia."""

    @property
    def digest(self) -> bytes:
        """Of what was sent."""

    def pick(self, frames: Sequence[int]) -> Iterator[Pixels]:
        """Those of these numbers, which do not decrease. Where the file has fewer than it said, the last stands in."""


@dataclass(frozen=True, slots=True)
class ClipFile:
    data: bytes = field(repr=False)
    header: ClipHeader
    rotation: int  # degrees that frames are turned by, against the clock, to be shown
    digest: bytes
    _packets: list[ClipPackets] = field(default_factory=list, repr=False, compare=False)  # once they were looked for

    @classmethod
    def of(cls, data: bytes) -> ClipFile:
        """Raises BadMedia for what is no clip, or too much of one. One frame is unpacked to see how it is turned."""
        from ingot.media.clip_decoding import clip_header

        check_bytes(len(data))
        header, rotation = clip_header(data)
        return cls(data, header, rotation, blake2b(data, digest_size=32).digest())

    @property
    def keyed(self) -> ClipHeader:
        packets = self._found()
        last = self.header.frames - 1
        numbers = (round((time - packets.start) * self.header.fps * packets.unit) for time in packets.key_times)
        return replace(self.header, keys=tuple(sorted({min(number, last) for number in numbers})))

    def pick(self, frames: Sequence[int]) -> Iterator[Pixels]:
        from ingot.media.clip_decoding import picked

        return picked(self.data, self._found(), self.header, self.rotation, frames)

    def _found(self) -> ClipPackets:
        from ingot.media.clip_decoding import clip_packets

        if not self._packets:
            self._packets.append(clip_packets(self.data))
        return self._packets[0]


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

    def pick(self, frames: Sequence[int]) -> Iterator[Pixels]:
        for number in frames:
            yield from self.pictures[number].frames()


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

    def frames(self) -> Iterator[Pixels]:
        return self.clip.pick(self.numbers)
