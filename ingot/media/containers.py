"""Containers and packets: what of a media file is read as packets, and which packets of a video have to be decoded to
see some of its frames.

Packets stand in the order in which they are decoded, which is not that in which frames are shown: a frame may refer to
ones that are shown after it. What they refer to never lies before the keyframe that they begin at.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from ingot.errors import BadMedia

_NEAR: Final = 8  # keyframes before a frame, of which as a rule the first will do
_REREAD: Final = 4
"""How often a file's bytes may be read as packets, compressed ones counted as what they become."""
_SLACK: Final = 1 << 16


@contextmanager
def open_container(
    data: bytes, format: str, kind: Literal["audio", "video"], thing: str, threads: int
) -> Iterator[tuple[Any, Any]]:
    """A file's container, of that format and no other, and its first stream of a kind. Raises BadMedia for what is
    wrong with it, also where that is found in the block."""
    import av

    try:
        with av.open(io.BytesIO(data), format=format) as container:
            stream = next(iter(getattr(container.streams, kind)), None)
            if stream is None:
                raise BadMedia(f"the file holds no {'sound' if kind == 'audio' else 'pictures, only sound'}.")
            if stream.codec_context is None:
                raise BadMedia(f"the {thing} is packed in a way that nobody here knows. Convert it.")
            stream.codec_context.thread_count = threads
            yield container, stream
    except (av.FFmpegError, ValueError, EOFError) as error:
        # In FFmpeg's own words, without its numbers and names.
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadMedia(f"the {thing} cannot be unpacked: {str(words)[:200]}.") from error


def bounded_packets(packets: Iterable[Any], length: int) -> Iterator[Any]:
    """Those of a file of `length` bytes that hold something. Raises BadMedia where there are more of them than so few
    bytes can hold: an index may name the same bytes again and again."""
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
    shown: bool  # some are there for others to refer to


@dataclass(slots=True)
class PacketRange:
    """Packets [begin, end), decoded one after another to show the frames of `times`, which rise."""

    begin: int
    end: int
    times: list[int]


@dataclass(frozen=True, slots=True)
class VideoPackets:
    packets: Sequence[PacketTime]
    unit: float = 1.0  # seconds that a time is counted in
    _shown: list[tuple[int, int]] = field(init=False, repr=False)  # times and packets, as they are shown
    _keys: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = sorted((packet.time, at) for at, packet in enumerate(self.packets) if packet.shown)
        if not found:
            raise BadMedia("the clip has no frame.")
        object.__setattr__(self, "_shown", found)
        object.__setattr__(self, "_keys", [at for at, packet in enumerate(self.packets) if packet.key])

    @property
    def start(self) -> int:
        return self._shown[0][0]

    @property
    def key_times(self) -> Iterator[int]:
        """When frames are shown that can be unpacked alone."""
        return (packet.time for at in self._keys if (packet := self.packets[at]).shown)

    def at(self, time: float) -> int:
        """The packet of the first frame that is shown at or after that time, or of the last there is."""
        last = self._shown[-1][0]
        return self._shown[bisect_left(self._shown, (min(time, last), -1))][1]

    def stretches(self, wanted: Iterable[int]) -> list[PacketRange]:
        """What to decode for these packets' frames, given in the order that they are shown in."""
        made: list[PacketRange] = []
        for packet in wanted:
            new = PacketRange(self._keyframe(packet), packet + 1, [self.packets[packet].time])
            while made and new.begin < made[-1].end:
                new = _merge_ranges(made.pop(), new)
            made.append(new)
        return made

    def _keyframe(self, packet: int) -> int:
        """The last that is decoded no later and shown no later: what follows a keyframe and is shown before it may
        refer to what was decoded before it. From the clip's first packet on all is known."""
        time = self.packets[packet].time
        after = bisect_right(self._keys, packet)
        near = (at for at in reversed(self._keys[max(0, after - _NEAR) : after]) if self.packets[at].time <= time)
        return next(near, 0)


def _merge_ranges(one: PacketRange, other: PacketRange) -> PacketRange:
    times = one.times + other.times[one.times[-1] == other.times[0] :]
    return PacketRange(min(one.begin, other.begin), max(one.end, other.end), times)
