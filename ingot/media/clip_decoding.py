"""Clips unpacked by PyAV, which comes with the extra `vision`.

The container is named by its first bytes, and nothing else is tried: some of FFmpeg's formats are lists of further
files and addresses, which a client must not make this server read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from ingot.errors import BadMedia, Unavailable
from ingot.media import bounds
from ingot.media.decoding import Pixels
from ingot.media.guard import check_size
from ingot.media.layout import ClipHeader
from ingot.media.size import Size

NO_PYAV: Final = "This server cannot unpack clips: install it with pip install 'ingot[vision]'."
KNOWN: Final = "MP4, MOV, WebM and Matroska are taken, and frames as data:video/jpeg;base64,…"
_REACH_S: Final = 2.0  # to a frame farther ahead than that, going to the keyframe before it may be quicker


def clip_header(data: bytes) -> tuple[ClipHeader, int]:
    """What the file says, and by how many degrees its frames are turned. Raises BadMedia."""
    with _opened(data) as (container, stream):
        size = Size(stream.codec_context.width, stream.codec_context.height)
        check_size(size)
        frames, fps = _frames(container, stream)
        first = next(container.decode(stream), None)
        if first is None:
            raise BadMedia("the clip has no frame.")
        turned = int(first.rotation) % 360
        shown = Size(size.height, size.width) if turned in (90, 270) else size
        return ClipHeader(shown, frames, fps), turned


def picked(data: bytes, header: ClipHeader, rotation: int, numbers: Sequence[int]) -> Iterator[Pixels]:
    """Frames by their time, so that neither a wrong count nor an uneven rate leads astray; one is held at a time."""
    with _opened(data) as (container, stream):
        stream.thread_type = "AUTO"
        frames = _Frames(container, stream)
        for number in numbers:
            frame = frames.at((number - 0.5) / header.fps)
            yield _pixels(frame, header, rotation)


class _Frames:
    """A clip's frames by time, from front to back."""

    def __init__(self, container: Any, stream: Any) -> None:
        self._container, self._stream = container, stream
        self._decoded = container.decode(stream)
        self._start: float | None = None
        self._frame: Any = None
        self._reach = _REACH_S

    def at(self, seconds: float) -> Any:
        """The first frame at or after that time, or the last there is."""
        self._leap(seconds)
        while self._frame is None or self._time(self._frame) < seconds:
            following = next(self._decoded, None)
            if following is None:
                break
            self._frame = following
        if self._frame is None:
            raise BadMedia("the clip has no frame.")
        return self._frame

    def _leap(self, seconds: float) -> None:
        here = 0.0 if self._frame is None else self._time(self._frame)
        if self._frame is None or seconds - here <= self._reach:
            return
        target = int((seconds + (self._start or 0.0)) / self._stream.time_base)
        self._container.seek(target, stream=self._stream, backward=True)
        self._decoded = self._container.decode(self._stream)
        landed = next(self._decoded, None)
        if landed is None:
            return
        if self._time(landed) <= here:
            self._reach *= 2  # keyframes are farther apart than that
        self._frame = landed

    def _time(self, frame: Any) -> float:
        found = float(frame.time or 0.0)
        if self._start is None:
            self._start = found
        return found - self._start


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
    pixels = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
    return np.ascontiguousarray(np.rot90(pixels, rotation // 90))


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    try:
        import av
    except ImportError as missing:
        raise Unavailable(NO_PYAV) from missing
    try:
        with av.open(io.BytesIO(data), format=_format(data)) as container:
            if not container.streams.video:
                raise BadMedia("the file holds no pictures, only sound.")
            yield container, container.streams.video[0]
    except (av.FFmpegError, ValueError, EOFError) as error:
        raise BadMedia(f"the clip cannot be unpacked: {str(error)[:200] or type(error).__name__}.") from error


def _format(data: bytes) -> str:
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    raise BadMedia(f"the file is no clip of a known format: {KNOWN}.")
