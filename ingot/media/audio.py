"""Sounds as clients send them, unpacked by PyAV piece by piece: an hour of speech never lies in memory as samples.
PyAV runs in a worker alone.

The container is named by its first bytes, and nothing else is tried: some of FFmpeg's formats are lists of further
files and addresses, which a client must not make this server read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Final

import numpy as np

from ingot.errors import BadMedia
from ingot.media import bounds, worker
from ingot.media.containers import bounded, opened
from ingot.media.mel import RATE, Floats
from ingot.media.worker import Job

NO_PYAV: Final = "This server cannot unpack sounds: its `ingot doctor` says what to install."
KNOWN: Final = "FLAC, MP3, MP4 (M4A), Ogg, WAV, WebM and AAC are taken"
SLACK_S: Final = 1.0
"""What a file may be short of the length that it states, besides a fiftieth of it."""

RIFF_BYTES: Final = 0xFFFFFFFF
DAMAGED_SHARE: Final = 0.01


class Sound:
    """A file that holds a sound, looked through once. Raises BadMedia for one that does not, or is cut off."""

    def __init__(self, data: bytes) -> None:
        worker.require("av", NO_PYAV)
        self._data = data
        job = Job("sound header", "sound", bounds.HEADER_MEMORY, bounds.HEADER_CPU_S, (bounds.SOUND_S,))
        self.seconds: float = worker.headers.run(job, data).value

    def samples(self) -> Iterator[Floats]:
        """The sound in one channel of 16,000 samples a second, a second at a time. A worker unpacks it, and stands
        still until the next is asked for."""
        job = Job("sound samples", "sound", bounds.SOUND_MEMORY, bounds.HEADER_CPU_S, (bounds.SOUND_S,))
        for part in worker.samples.stream(job, self._data):
            yield np.frombuffer(part.data, "<i2").astype(np.float32) / 32768.0


# From here on, for a worker


def header_job(data: bytes, longest: float) -> Iterator[tuple[float, bytes]]:
    """How long the sound lasts."""
    check_bytes_stated(data)
    with _opened(data) as (container, stream):
        check_form(stream.codec_context)
        stated = seconds_stated(container, stream)
        if next(decoded(container, stream, len(data)), None) is None:
            raise BadMedia("the sound is empty: it has no samples.")
    with _opened(data) as (container, stream):
        seconds = seconds_held(container, stream, stated, len(data))
    if seconds > longest:
        raise BadMedia(f"the sound is longer than {longest / 3600:g} hours. Cut it.")
    if stated is not None and seconds < 0.98 * stated - SLACK_S:
        raise BadMedia(
            f"the file is cut off: it says that it lasts {stated:.1f} seconds, and {seconds:.1f} of them are there."
        )
    yield seconds, b""


def samples_job(data: bytes, longest: float) -> Iterator[tuple[None, bytearray]]:
    """Of 16 bits, about a second at a time."""
    held, left = bytearray(), 2 * RATE * (longest + SLACK_S)
    for made in _resampled(data):
        held += made
        if len(held) >= 2 * RATE:
            left -= len(held)
            if left < 0:
                raise BadMedia(f"the sound is longer than {longest / 3600:g} hours. Cut it.")
            yield None, held
            held = bytearray()
    if held:
        yield None, held


def _resampled(data: bytes) -> Iterator[bytes]:
    import av

    with _opened(data) as (container, stream):
        resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
        exact = stream.codec_context.name.startswith("pcm_f")
        for frame in decoded(container, stream, len(data)):
            if exact and not np.isfinite(frame.to_ndarray()).all():
                raise BadMedia("the sound has samples that are no numbers.")
            frame.pts = None  # a gap in the times would be filled with silence of any length
            yield from (made.to_ndarray()[0].astype("<i2").tobytes() for made in resampler.resample(frame))
        yield from (made.to_ndarray()[0].astype("<i2").tobytes() for made in resampler.resample(None))


def _opened(data: bytes) -> AbstractContextManager[tuple[Any, Any]]:
    return opened(data, container_of(data), "audio", "sound", threads=1)


def decoded(container: Any, stream: Any, length: int) -> Iterator[Any]:
    """The frames of a sound. Packets that are damaged are left out, as players do, but no more than a few."""
    from av import InvalidDataError

    damaged = 0
    for number, packet in enumerate(chain(bounded(container.demux(stream), length), [None])):
        try:
            frames = stream.codec_context.decode(packet)
        except InvalidDataError:
            damaged += 1
            if damaged > 1 + number * DAMAGED_SHARE:
                raise
            continue
        yield from frames


def check_form(decoder: Any) -> None:
    """Raises BadMedia for rates and channels that no sound has."""
    rate, channels = decoder.sample_rate or 0, decoder.channels or 0
    if not bounds.SOUND_RATE[0] <= rate <= bounds.SOUND_RATE[1]:
        raise BadMedia(
            f"the sound has {rate} samples a second; from {bounds.SOUND_RATE[0]} to {bounds.SOUND_RATE[1]} are taken."
        )
    if not bounds.SOUND_CHANNELS[0] <= channels <= bounds.SOUND_CHANNELS[1]:
        raise BadMedia(
            f"the sound has {channels} channels; from {bounds.SOUND_CHANNELS[0]} to "
            f"{bounds.SOUND_CHANNELS[1]} are taken."
        )


def check_bytes_stated(data: bytes) -> None:
    """Raises BadMedia for a WAV file that says that it has more bytes: FFmpeg takes it for a shorter one.

    Recorders that do not know yet how long it will be write none, or as many as can be."""
    stated = int.from_bytes(data[4:8], "little") + 8 if data.startswith(b"RIFF") else 0
    if len(data) < 0.98 * stated < 0.98 * RIFF_BYTES:
        raise BadMedia(f"the file is cut off: it says that it has {stated} bytes, and {len(data)} of them are there.")


def seconds_stated(container: Any, stream: Any) -> float | None:
    """How long the file says that it lasts, where its format says that exactly."""
    if container.format.name.split(",")[0] not in ("flac", "mov") or stream.duration is None:
        return None
    return float(stream.duration * stream.time_base)


def seconds_held(container: Any, stream: Any, stated: float | None, length: int) -> float:
    """How long what is there lasts, by its packets; nothing is decoded for it."""
    begin = stream.start_time or 0
    ends = (
        packet.pts + packet.duration
        for packet in bounded(container.demux(stream), length)
        if packet.pts is not None and packet.duration is not None
    )
    return float((max(ends, default=begin) - begin) * stream.time_base) or (stated or 0.0)


def container_of(data: bytes) -> str:
    """The name of FFmpeg's format. Raises BadMedia for what is none of those that are taken."""
    if not data:
        raise BadMedia("the file is empty.")
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "wav"
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free"):
        return "mov"
    for start, name in ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"\x1a\x45\xdf\xa3", "matroska"), (b"ID3", "mp3")):
        if data.startswith(start):
            return name
    if len(data) > 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        return "mp3" if data[1] & 0x06 else "aac"
    raise BadMedia(f"the file is no sound of a known format: {KNOWN}.")
