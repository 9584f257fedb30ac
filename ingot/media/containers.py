"""Containers and packets of media files, and which packets of a video must be decoded for some of its frames.

Packets are in decoding order, which is not the order in which frames are shown: a frame may refer to later ones. It
never refers to anything before its keyframe.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from ingot.errors import BadMedia

_NEAR: Final = 8  # keyframes before a frame that are tried; usually the first will do
_REREAD: Final = 4
"""How many times a file's size its packets may have in all, after decompression."""
_SLACK: Final = 1 << 16


@contextmanager
def open_container(
    data: bytes, format: str, kind: Literal["audio", "video"], threads: int
) -> Iterator[tuple[Any, Any]]:
    """A file's container, of that format only, and its first stream of a kind. Raises BadMedia where something is wrong
    with it, also while the block runs."""
    import av

    try:
        with av.open(io.BytesIO(data), format=format) as container:
            stream = next(iter(getattr(container.streams, kind)), None)
            if stream is None:
                raise BadMedia(f"the file has no {'audio' if kind == 'audio' else 'video, only audio'}.")
            if stream.codec_context is None:
                raise BadMedia(f"the {kind} is packed in a way that nobody here knows. Convert it.")
            stream.codec_context.thread_count = threads
            yield container, stream
    except (av.FFmpegError, ValueError, EOFError) as error:
        # In FFmpeg's own words, without its numbers and names.
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadMedia(f"the {kind} cannot be unpacked: {str(reason)[:200]}.") from error


def bounded_packets(packets: Iterable[Any], length: int) -> Iterator[Any]:
    """The packets of a file of `length` bytes that are not empty. Raises BadMedia where they are larger in all than
    such a file can have: an index may refer to the same bytes again and again."""
    left = _REREAD * length + _SLACK
    for packet in packets:
        if packet.size:
            left -= packet.size
            if left < 0:
                raise BadMedia("the file says that it holds far more than it has bytes for.")
            yield packet


class PacketTime(NamedTuple):
    time: int  # when its frame is shown, in the stream's own units
    key: bool  # decoding can begin here
    shown: bool  # some are only referred to


@dataclass(slots=True)
class PacketRange:
    """Packets [begin, end) to decode for the frames of `times`, in order."""

    begin: int
    end: int
    times: list[int]


@dataclass(frozen=True, slots=True)
class VideoPackets:
    packets: Sequence[PacketTime]
    unit: float = 1.0  # seconds of a time unit
    _shown: list[tuple[int, int]] = field(init=False, repr=False)  # times and packets, in display order
    _keys: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = sorted((packet.time, at) for at, packet in enumerate(self.packets) if packet.shown)
        if not found:
            raise BadMedia("the video has no frame.")
        object.__setattr__(self, "_shown", found)
        object.__setattr__(self, "_keys", [at for at, packet in enumerate(self.packets) if packet.key])

    @property
    def start(self) -> int:
        return self._shown[0][0]

    @property
    def key_times(self) -> Iterator[int]:
        """The times of frames that can be decoded alone."""
        return (packet.time for at in self._keys if (packet := self.packets[at]).shown)

    def at(self, time: float) -> int:
        """The packet of the first frame at or after that time, or of the last frame."""
        last = self._shown[-1][0]
        return self._shown[bisect_left(self._shown, (min(time, last), -1))][1]

    def ranges(self, packets: Iterable[int]) -> list[PacketRange]:
        """The ranges to decode for these packets' frames, which are in display order."""
        ranges: list[PacketRange] = []
        for packet in packets:
            new = PacketRange(self._keyframe(packet), packet + 1, [self.packets[packet].time])
            while ranges and new.begin < ranges[-1].end:
                new = _merge_ranges(ranges.pop(), new)
            ranges.append(new)
        return ranges

    def _keyframe(self, packet: int) -> int:
        """The last keyframe that is decoded and shown no later than a packet: a frame that is decoded after a keyframe
        and shown before it may refer to earlier ones. The video's first packet always works."""
        time = self.packets[packet].time
        after = bisect_right(self._keys, packet)
        near = (at for at in reversed(self._keys[max(0, after - _NEAR) : after]) if self.packets[at].time <= time)
        return next(near, 0)


def _merge_ranges(one: PacketRange, other: PacketRange) -> PacketRange:
    times = one.times + other.times[one.times[-1] == other.times[0] :]
    return PacketRange(min(one.begin, other.begin), max(one.end, other.end), times)
