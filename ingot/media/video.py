"""Video: a file, or frames that a client sent as images, and its pixels, decoded by PyAV in a worker process when they
are requested.

The functions that end in `_job`, and what they call, run only in a worker; they import PyAV, which comes with the extra
`vision`. The container's format is determined by its first bytes, and no other is tried: some of FFmpeg's formats are
lists of other files and addresses, which a client must not make this server read. Raises BadMedia.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from ingot.errors import BadMedia
from ingot.media import bounds, worker
from ingot.media.containers import PacketRange, PacketTime, VideoPackets, bounded_packets, open_container
from ingot.media.images import BICUBIC, DecodingMemory, ImageFile, Pixels, View, frames_of_parts, render_views
from ingot.media.layout import Size, VideoHeader, check_file_size, check_image_size
from ingot.media.worker import DecodeJob

NO_PYAV: Final = "This server cannot unpack videos: its `ingot doctor` says what to install."


@dataclass(frozen=True, slots=True)
class VideoFile:
    data: bytes = field(repr=False)
    header: VideoHeader
    rotation: int  # degrees, counterclockwise, by which frames are rotated for display
    digest: bytes  # of the file

    @classmethod
    def of(cls, data: bytes) -> VideoFile:
        """Raises BadMedia for what is not a video, or too large. One frame is decoded for its rotation."""
        check_file_size(len(data))
        worker.require_package("av", NO_PYAV)
        job = DecodeJob("video header", "video", bounds.VIDEO_MEMORY, bounds.VIDEO_CPU_S)
        (width, height), frames, fps, rotation = worker.pixel_pool.run(job, data).value
        size = Size(width, height)
        check_image_size(size)
        return cls(data, VideoHeader(size, frames, fps), rotation, blake2b(data, digest_size=32).digest())

    @property
    def keyed(self) -> VideoHeader:
        """The header with keyframes. Nothing is decoded. Raises BadMedia."""
        job = DecodeJob(
            "video keys", "video", bounds.VIDEO_MEMORY, bounds.VIDEO_CPU_S, (self.header.frames, self.header.fps)
        )
        return replace(self.header, keys=tuple(worker.pixel_pool.run(job, self.data).value))

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        return DecodingMemory.of(bounds.VIDEO_MEMORY, bounds.VIDEO_PIXEL_BYTES, self.header.size, views)

    def pick(self, frames: Sequence[int], *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        """The frames of these numbers, which do not decrease, each in all views. If the file has fewer frames than
        stated, the last one is repeated."""
        header = (self.header.size, self.header.frames, self.header.fps, self.rotation)
        memory = self.unpacking(views).memory
        job = DecodeJob("video frames", "video", memory, bounds.VIDEO_CPU_S, (header, tuple(frames), views, resample))
        return frames_of_parts(worker.pixel_pool.stream(job, self.data), self.header.size, views)


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """Frames of a video that a client sent as images, all of one size."""

    images: tuple[ImageFile, ...]
    fps: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.images) <= bounds.SENT_FRAMES:
            raise BadMedia(f"a video has 1 to {bounds.SENT_FRAMES} frames; this one has {len(self.images)}.")
        sizes = {image.size for image in self.images}
        if len(sizes) > 1:
            (one, other) = sorted(sizes)[:2]
            raise BadMedia(
                f"the frames of a video are of one size; these are of {one.width} by {one.height} and {other.width} by "
                f"{other.height} pixels. Send them as images, or resize them."
            )

    @property
    def header(self) -> VideoHeader:
        return VideoHeader(self.images[0].size, len(self.images), self.fps)

    @property
    def keyed(self) -> VideoHeader:
        """Each of them is an image of its own."""
        return self.header

    @property
    def digest(self) -> bytes:
        digests = b"".join(image.digest for image in self.images)
        return blake2b(digests + repr(self.fps).encode(), digest_size=32).digest()

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        return max((image.unpacking(views) for image in self.images), key=lambda each: each.memory)

    def pick(self, frames: Sequence[int], *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        for number in frames:
            yield from self.images[number].frames(*views, resample=resample)


Video = VideoFile | VideoFrames


@dataclass(frozen=True, slots=True)
class SampledFrames:
    """Some frames of a video, as a source of pixels."""

    video: Video
    numbers: tuple[int, ...]

    @property
    def size(self) -> Size:
        return self.video.header.size

    @property
    def digest(self) -> bytes:
        return blake2b(self.video.digest + repr(self.numbers).encode(), digest_size=32).digest()

    def unpacking(self, views: Sequence[View]) -> DecodingMemory:
        return self.video.unpacking(views)

    def frames(self, *views: View, resample: int = BICUBIC) -> Iterator[Pixels]:
        return self.video.pick(self.numbers, *views, resample=resample)


KNOWN_VIDEO: Final = "MP4, MOV, WebM and Matroska are taken, and frames as data:video/jpeg;base64,…"
# Decoders that can correctly skip frames that no other refers to. With HEVC, frames of other layers may refer to
# skipped ones.
_SKIPPING: Final = ("h264", "mpeg2video", "mpeg4", "vp8")
_VP8_SHOWN: Final = 0x10  # of a frame's first byte
_THREADS: Final = min(4, os.cpu_count() or 1)
"""Of a decoder. Each thread has frames of its own in memory."""


def video_header_job(data: bytes) -> Iterator[tuple[Any, bytes]]:
    header, rotation = read_video_header(data)
    yield (header.size, header.frames, header.fps, rotation), b""


def video_keyframes_job(data: bytes, frames: int, fps: float) -> Iterator[tuple[Any, bytes]]:
    yield keyframe_numbers(read_video_packets(data), frames, fps), b""


def video_frames_job(
    data: bytes, facts: Sequence[Any], numbers: Sequence[int], views: Sequence[Sequence[Sequence[int]]], resample: int
) -> Iterator[tuple[Any, Any]]:
    from PIL import Image

    (width, height), count, fps, rotation = facts
    header = VideoHeader(Size(width, height), count, fps)
    for frame in decode_frames(data, read_video_packets(data), header, rotation, numbers):
        yield from render_views(Image.fromarray(frame), views, resample)


def read_video_header(data: bytes) -> tuple[VideoHeader, int]:
    """The header, and by how many degrees frames are rotated. Raises BadMedia."""
    with _open_video(data) as (container, stream):
        size = Size(stream.codec_context.width, stream.codec_context.height)
        check_image_size(size)
        frames, fps = _frame_count_and_rate(container, stream)
        first = next(container.decode(stream), None)
        if first is None:
            raise BadMedia("the video has no frame.")
        _check_frame(first, size)
        rotation = int(first.rotation) % 360
        shown = Size(size.height, size.width) if rotation in (90, 270) else size
        return VideoHeader(shown, frames, fps), rotation


def read_video_packets(data: bytes) -> VideoPackets:
    """Nothing is decoded. Raises BadMedia."""
    with _open_video(data) as (container, stream):
        times = [_packet_time(packet, stream) for packet in _demuxed_packets(container, stream, len(data))]
        return VideoPackets(times, float(stream.time_base))


def keyframe_numbers(packets: VideoPackets, frames: int, fps: float) -> list[int]:
    """Which of so many frames can be decoded alone."""
    numbers = (round((time - packets.start) * fps * packets.unit) for time in packets.key_times)
    return sorted({min(number, frames - 1) for number in numbers})


def decode_frames(
    data: bytes, packets: VideoPackets, header: VideoHeader, rotation: int, numbers: Sequence[int]
) -> Iterator[Pixels]:
    """Frames by their time, so that neither a wrong count nor a variable rate matters; one is in memory at a time. Only
    packets from a keyframe to a requested frame are decoded."""
    with _open_video(data) as (container, stream):
        rate = header.fps * packets.unit
        selected = [packets.at(packets.start + (number - 0.5) / rate) for number in numbers]
        frames = _decode_ranges(container, stream, packets.ranges(selected), len(data))
        previous, pixels = -1, None
        for packet in selected:
            if packet != previous:
                previous, pixels = packet, _frame_pixels(next(frames), header, rotation)
            assert pixels is not None
            yield pixels


def _decode_ranges(container: Any, stream: Any, ranges: Sequence[PacketRange], length: int) -> Iterator[Any]:
    """A frame for each time of the ranges. Where a damaged file has none, the previous one is repeated."""
    stream.thread_type = "AUTO"
    last, packets = None, enumerate(_demuxed_packets(container, stream, length))
    for packet_range in ranges:
        frames = _range_frames(stream, packets, packet_range)
        for time in packet_range.times:
            while last is None or last.pts is None or last.pts < time:
                following = next(frames, None)
                if following is None:
                    break
                last = following
            if last is None:
                raise BadMedia("the video has no frame.")
            yield last


def _range_frames(stream: Any, packets: Iterator[tuple[int, Any]], packet_range: PacketRange) -> Iterator[Any]:
    """The frames of a range, in order; some that no other refers to and that are not requested may be missing."""
    decoder, times = stream.codec_context, set(packet_range.times)
    skipped = "NONREF" if decoder.name in _SKIPPING else "DEFAULT"
    decoder.flush_buffers()
    for at, packet in packets:
        if at >= packet_range.begin:
            decoder.skip_frame = "DEFAULT" if packet.pts in times else skipped
            yield from decoder.decode(packet)
        if at + 1 == packet_range.end:
            break
    yield from decoder.decode(None)


def _demuxed_packets(container: Any, stream: Any, length: int) -> Iterator[Any]:
    return bounded_packets(container.demux(stream), length)  # an empty packet would end decoding


def _check_frame(frame: Any, size: Size) -> None:
    """Raises BadMedia where a frame is larger than the file stated, since no memory is reserved for it."""
    if frame.width > size.width or frame.height > size.height:
        raise BadMedia(
            f"the video states a size of {size.width} by {size.height} pixels, and has frames of {frame.width} by "
            f"{frame.height}."
        )


def _packet_time(packet: Any, stream: Any) -> PacketTime:
    if packet.pts is None:
        raise BadMedia("the video does not state when each frame is shown. Convert it to MP4.")
    shown = not packet.is_discard and (stream.codec_context.name != "vp8" or bool(memoryview(packet)[0] & _VP8_SHOWN))
    return PacketTime(packet.pts, packet.is_keyframe, shown)


def _frame_count_and_rate(container: Any, stream: Any) -> tuple[int, float]:
    """The number of frames and the frame rate, from whatever the file states."""
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    if not bounds.FPS[0] <= fps <= 10_000:
        raise BadMedia("the video does not state its frame rate.")
    seconds = 0.0
    if stream.duration is not None:
        seconds = float(stream.duration * stream.time_base)
    elif container.duration is not None:
        seconds = container.duration / 1_000_000
    timed = round(seconds * fps)
    frames = int(stream.frames) or timed
    if timed and frames > 2 * timed + 2:  # a count that does not fit the duration
        frames = timed
    if frames < 1:
        raise BadMedia("the video has no frame.")
    if frames / fps > bounds.VIDEO_S:
        raise BadMedia(f"the video is longer than {bounds.VIDEO_S / 3600:g} hours. Cut it.")
    return frames, fps


def _frame_pixels(frame: Any, header: VideoHeader, rotation: int) -> Pixels:
    sideways = rotation in (90, 270)
    width, height = (header.size.height, header.size.width) if sideways else header.size
    _check_frame(frame, Size(width, height))
    pixels = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
    return np.ascontiguousarray(np.rot90(pixels, rotation // 90))


def _open_video(data: bytes) -> AbstractContextManager[tuple[Any, Any]]:
    return open_container(data, _video_format(data), "video", _THREADS)


def _video_format(data: bytes) -> str:
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    raise BadMedia(f"the file is not a video of a known format: {KNOWN_VIDEO}.")
