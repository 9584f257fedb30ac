"""Clips unpacked by PyAV, which comes with the extra `vision`. Runs in a worker alone.

The container is named by its first bytes, and nothing else is tried: some of FFmpeg's formats are lists of further
files and addresses, which a client must not make this server read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np

from ingot.errors import BadMedia
from ingot.media import bounds
from ingot.media.containers import ClipPackets, PacketTime, Stretch, bounded, opened
from ingot.media.guard import check_size
from ingot.media.images import viewed
from ingot.media.layout import ClipHeader
from ingot.media.picture import Pixels
from ingot.media.size import Size

KNOWN: Final = "MP4, MOV, WebM and Matroska are taken, and frames as data:video/jpeg;base64,…"
# Decoders that can leave out frames that no other refers to, and are right about which those are: of HEVC's, frames of
# other layers may refer to ones that are called so.
_SKIPPING: Final = ("h264", "mpeg2video", "mpeg4", "vp8")
_VP8_SHOWN: Final = 0x10  # of a frame's first byte
_THREADS: Final = min(4, os.cpu_count() or 1)
"""Of a decoder: each holds frames of its own."""


def header_job(data: bytes) -> Iterator[tuple[Any, bytes]]:
    header, rotation = clip_header(data)
    yield (header.size, header.frames, header.fps, rotation), b""


def keys_job(data: bytes, frames: int, fps: float) -> Iterator[tuple[Any, bytes]]:
    yield key_numbers(clip_packets(data), frames, fps), b""


def frames_job(
    data: bytes, said: Sequence[Any], numbers: Sequence[int], views: Sequence[Sequence[Sequence[int]]], resample: int
) -> Iterator[tuple[Any, Any]]:
    from PIL import Image

    (width, height), count, fps, rotation = said
    header = ClipHeader(Size(width, height), count, fps)
    for frame in picked(data, clip_packets(data), header, rotation, numbers):
        yield from viewed(Image.fromarray(frame), views, resample)


def clip_header(data: bytes) -> tuple[ClipHeader, int]:
    """What the file says, and by how many degrees its frames are turned. Raises BadMedia."""
    with _opened(data) as (container, stream):
        size = Size(stream.codec_context.width, stream.codec_context.height)
        check_size(size)
        frames, fps = _frames(container, stream)
        first = next(container.decode(stream), None)
        if first is None:
            raise BadMedia("the clip has no frame.")
        _check_frame(first, size)
        turned = int(first.rotation) % 360
        shown = Size(size.height, size.width) if turned in (90, 270) else size
        return ClipHeader(shown, frames, fps), turned


def clip_packets(data: bytes) -> ClipPackets:
    """Nothing is decoded for it. Raises BadMedia."""
    with _opened(data) as (container, stream):
        times = [_packet_time(packet, stream) for packet in _packets(container, stream, len(data))]
        return ClipPackets(times, float(stream.time_base))


def key_numbers(packets: ClipPackets, frames: int, fps: float) -> list[int]:
    """Which of so many frames can be unpacked alone."""
    numbers = (round((time - packets.start) * fps * packets.unit) for time in packets.key_times)
    return sorted({min(number, frames - 1) for number in numbers})


def picked(
    data: bytes, packets: ClipPackets, header: ClipHeader, rotation: int, numbers: Sequence[int]
) -> Iterator[Pixels]:
    """Frames by their time, so that neither a wrong count nor an uneven rate leads astray; one is held at a time.

    Of the file no more is decoded than leads from a keyframe to a frame that is asked for.
    """
    with _opened(data) as (container, stream):
        rate = header.fps * packets.unit
        wanted = [packets.at(packets.start + (number - 0.5) / rate) for number in numbers]
        shown = _decoded(container, stream, packets.stretches(wanted), len(data))
        before, pixels = -1, None
        for packet in wanted:
            if packet != before:
                before, pixels = packet, _pixels(next(shown), header, rotation)
            assert pixels is not None, "the first is never the one before"
            yield pixels


def _decoded(container: Any, stream: Any, stretches: Sequence[Stretch], length: int) -> Iterator[Any]:
    """A frame for each time of the stretches. Where a damaged file gives none, the one before stands in."""
    stream.thread_type = "AUTO"
    last, packets = None, enumerate(_packets(container, stream, length))
    for stretch in stretches:
        frames = _stretch_frames(stream, packets, stretch)
        for time in stretch.times:
            while last is None or last.pts is None or last.pts < time:
                following = next(frames, None)
                if following is None:
                    break
                last = following
            if last is None:
                raise BadMedia("the clip has no frame.")
            yield last


def _stretch_frames(stream: Any, packets: Iterator[tuple[int, Any]], stretch: Stretch) -> Iterator[Any]:
    """What is shown of a stretch, in order; frames that nobody refers to or asks for may be missing."""
    decoder, times = stream.codec_context, set(stretch.times)
    skipped = "NONREF" if decoder.name in _SKIPPING else "DEFAULT"
    decoder.flush_buffers()
    for at, packet in packets:
        if at >= stretch.begin:
            decoder.skip_frame = "DEFAULT" if packet.pts in times else skipped
            yield from decoder.decode(packet)
        if at + 1 == stretch.end:
            break
    yield from decoder.decode(None)


def _packets(container: Any, stream: Any, length: int) -> Iterator[Any]:
    return bounded(container.demux(stream), length)  # an empty one, which is left out, would end decoding


def _check_frame(frame: Any, size: Size) -> None:
    """Raises BadMedia where a frame is larger than the file said, for which no memory is booked."""
    if frame.width > size.width or frame.height > size.height:
        raise BadMedia(
            f"the clip says that it is {size.width} by {size.height} pixels, and has frames of {frame.width} by "
            f"{frame.height}."
        )


def _packet_time(packet: Any, stream: Any) -> PacketTime:
    if packet.pts is None:
        raise BadMedia("the clip does not say when each of its frames is shown. Convert it to MP4.")
    shown = not packet.is_discard and (stream.codec_context.name != "vp8" or bool(memoryview(packet)[0] & _VP8_SHOWN))
    return PacketTime(packet.pts, packet.is_keyframe, shown)


def _frames(container: Any, stream: Any) -> tuple[int, float]:
    """How many there are and how many a second, by whatever the file says of it."""
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    if not bounds.FPS[0] <= fps <= 10_000:
        raise BadMedia("the clip does not say how many frames it has a second.")
    seconds = 0.0
    if stream.duration is not None:
        seconds = float(stream.duration * stream.time_base)
    elif container.duration is not None:
        seconds = container.duration / 1_000_000
    timed = round(seconds * fps)
    frames = int(stream.frames) or timed
    if timed and frames > 2 * timed + 2:  # a count that no such time could hold
        frames = timed
    if frames < 1:
        raise BadMedia("the clip has no frame.")
    if frames / fps > bounds.CLIP_S:
        raise BadMedia(f"the clip is longer than {bounds.CLIP_S / 3600:g} hours. Cut it.")
    return frames, fps


def _pixels(frame: Any, header: ClipHeader, rotation: int) -> Pixels:
    aside = rotation in (90, 270)
    width, height = (header.size.height, header.size.width) if aside else header.size
    _check_frame(frame, Size(width, height))
    pixels = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
    return np.ascontiguousarray(np.rot90(pixels, rotation // 90))


def _opened(data: bytes) -> AbstractContextManager[tuple[Any, Any]]:
    return opened(data, _format(data), "video", "clip", _THREADS)


def _format(data: bytes) -> str:
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    raise BadMedia(f"the file is no clip of a known format: {KNOWN}.")
