"""Audio: files as clients send them, decoded by PyAV piece by piece in a worker process, and mel spectrograms.

Long audio is never in memory as samples. The container's format is determined by its first bytes, and no other is
tried: some of FFmpeg's formats are lists of other files and addresses, which a client must not make this server read.
The input of Whisper-like models is a mel spectrogram with a frame every hundredth of a second (`MelFrames`). Raises
BadMedia.

Speech is encoded as a stream: samples in, bytes of a format out. Only a codec's own look-ahead is buffered.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np

from ingot.errors import BadMedia, Unsupported
from ingot.media import bounds, worker
from ingot.media.containers import bounded_packets, open_container
from ingot.media.worker import DecodeJob

SAMPLE_BYTES: Final = 2
"""Bytes of a sample."""
UNKNOWN_LENGTH: Final = 0xFFFFFFFF
"""A length that is unknown when the header is written."""


@dataclass(frozen=True, slots=True)
class AudioCodec:
    """A format that PyAV writes: the container, its codec, and their options."""

    media_type: str
    container: str
    codec: str
    bit_rate: int = 0
    options: Mapping[str, str] = field(default_factory=dict)


AUDIO_CODECS: Final = {
    # The output is not seekable, so nothing may be rewritten.
    "mp3": AudioCodec("audio/mpeg", "mp3", "libmp3lame", 128_000, {"write_xing": "0"}),
    "opus": AudioCodec("audio/ogg", "ogg", "libopus", 64_000),
    "aac": AudioCodec("audio/aac", "adts", "aac", 128_000),
    "flac": AudioCodec("audio/flac", "flac", "flac"),
}
AUDIO_MEDIA_TYPES: Final = {
    **{name: codec.media_type for name, codec in AUDIO_CODECS.items()},
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


def audio_writer(format: str, rate: int) -> PlainAudioWriter | CodedAudioWriter:
    """Takes 16-bit little-endian samples of one channel, and returns the bytes of the file as they are known. Raises
    Unsupported where PyAV is needed and not installed."""
    if format in AUDIO_CODECS:
        return CodedAudioWriter(AUDIO_CODECS[format], format, rate)
    return PlainAudioWriter(wav_header(rate) if format == "wav" else b"")


class PlainAudioWriter:
    def __init__(self, header: bytes) -> None:
        self._header = header

    def write(self, samples: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + samples

    def close(self) -> bytes:
        return self._header


def wav_header(rate: int) -> bytes:
    """For one channel, of unknown length."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES)
    return struct.pack("<4sI4s", b"RIFF", UNKNOWN_LENGTH, b"WAVE") + form + struct.pack("<4sI", b"data", UNKNOWN_LENGTH)


class _AudioSink:
    """A file that cannot seek, for the container."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def drain(self) -> bytes:
        data, self._parts = b"".join(self._parts), []
        return data


class CodedAudioWriter:
    def __init__(self, codec: AudioCodec, format: str, rate: int) -> None:
        try:
            import av
        except ImportError as error:
            raise Unsupported(
                f"{format} is written by PyAV, which is not installed here: `ingot doctor` says how to. wav and "
                "pcm need none.",
                param="response_format",
            ) from error
        self._sink, self._rate, self._written = _AudioSink(), rate, 0
        self._frame: Any = av.AudioFrame
        self._file = av.open(self._sink, "w", format=codec.container, options=dict(codec.options))
        stream: Any = self._file.add_stream(codec.codec, rate=rate)
        self._stream = stream
        stream.layout = "mono"
        if codec.bit_rate:
            stream.bit_rate = codec.bit_rate

    def write(self, samples: bytes) -> bytes:
        frame = self._frame.from_ndarray(np.frombuffer(samples, "<i2")[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._written
        self._written += frame.samples
        self._file.mux(self._stream.encode(frame))
        return self._sink.drain()

    def close(self) -> bytes:
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._sink.drain()


NO_PYAV: Final = "This server cannot unpack audio: its `ingot doctor` says what to install."
KNOWN_AUDIO: Final = "FLAC, MP3, MP4 (M4A), Ogg, WAV, WebM and AAC are taken"
SLACK_S: Final = 1.0
"""How much shorter than its stated length a file may be, in addition to a fiftieth of it."""

RIFF_BYTES: Final = 0xFFFFFFFF
DAMAGED_SHARE: Final = 0.01


class AudioFile:
    """An audio file. Raises BadMedia for a file without audio, or a truncated one."""

    def __init__(self, data: bytes) -> None:
        worker.require_package("av", NO_PYAV)
        self._data = data
        job = DecodeJob("audio header", "audio", bounds.HEADER_MEMORY, bounds.HEADER_CPU_S, (bounds.AUDIO_S,))
        self.seconds: float = worker.header_pool.run(job, data).value

    def samples(self) -> Iterator[FloatArray]:
        """One channel of 16,000 samples a second, a second at a time. A worker decodes it, and waits until the next is
        requested."""
        job = DecodeJob("audio samples", "audio", bounds.AUDIO_MEMORY, bounds.HEADER_CPU_S, (bounds.AUDIO_S,))
        for part in worker.audio_pool.stream(job, self._data):
            yield np.frombuffer(part.data, "<i2").astype(np.float32) / 32768.0


# From here on, for a worker


def audio_header_job(data: bytes, longest: float) -> Iterator[tuple[float, bytes]]:
    """The length of the audio in seconds."""
    check_riff_length(data)
    with _open_audio(data) as (container, stream):
        check_audio_form(stream.codec_context)
        stated = seconds_stated(container, stream)
        if next(decode_audio(container, stream, len(data)), None) is None:
            raise BadMedia("the audio is empty: it has no samples.")
    with _open_audio(data) as (container, stream):
        seconds = seconds_held(container, stream, stated, len(data))
    if seconds > longest:
        raise BadMedia(f"the audio is longer than {longest / 3600:g} hours. Cut it.")
    if stated is not None and seconds < 0.98 * stated - SLACK_S:
        raise BadMedia(f"the file is truncated: it states a length of {stated:.1f} seconds, and has {seconds:.1f}.")
    yield seconds, b""


def audio_samples_job(data: bytes, longest: float) -> Iterator[tuple[None, bytearray]]:
    """Samples of 16 bits, about a second at a time."""
    samples, left = bytearray(), 2 * SAMPLE_RATE * (longest + SLACK_S)
    for part in _resample_audio(data):
        samples += part
        if len(samples) >= 2 * SAMPLE_RATE:
            left -= len(samples)
            if left < 0:
                raise BadMedia(f"the audio is longer than {longest / 3600:g} hours. Cut it.")
            yield None, samples
            samples = bytearray()
    if samples:
        yield None, samples


def _resample_audio(data: bytes) -> Iterator[bytes]:
    import av

    with _open_audio(data) as (container, stream):
        resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
        exact = stream.codec_context.name.startswith("pcm_f")
        for frame in decode_audio(container, stream, len(data)):
            if exact and not np.isfinite(frame.to_ndarray()).all():
                raise BadMedia("the audio has samples that are not finite numbers.")
            frame.pts = None  # a gap in the times would be filled with silence of any length
            yield from (part.to_ndarray()[0].astype("<i2").tobytes() for part in resampler.resample(frame))
        yield from (part.to_ndarray()[0].astype("<i2").tobytes() for part in resampler.resample(None))


def _open_audio(data: bytes) -> AbstractContextManager[tuple[Any, Any]]:
    return open_container(data, audio_container_of(data), "audio", threads=1)


def decode_audio(container: Any, stream: Any, length: int) -> Iterator[Any]:
    """The decoded frames. A few damaged packets are skipped, as players do."""
    from av import InvalidDataError

    damaged = 0
    for number, packet in enumerate(chain(bounded_packets(container.demux(stream), length), [None])):
        try:
            frames = stream.codec_context.decode(packet)
        except InvalidDataError:
            damaged += 1
            if damaged > 1 + number * DAMAGED_SHARE:
                raise
            continue
        yield from frames


def check_audio_form(decoder: Any) -> None:
    """Raises BadMedia for an unsupported sample rate or number of channels."""
    rate, channels = decoder.sample_rate or 0, decoder.channels or 0
    if not bounds.AUDIO_RATE[0] <= rate <= bounds.AUDIO_RATE[1]:
        raise BadMedia(
            f"the audio has {rate} samples a second; {bounds.AUDIO_RATE[0]} to {bounds.AUDIO_RATE[1]} are accepted."
        )
    if not bounds.AUDIO_CHANNELS[0] <= channels <= bounds.AUDIO_CHANNELS[1]:
        raise BadMedia(
            f"the audio has {channels} channels; {bounds.AUDIO_CHANNELS[0]} to {bounds.AUDIO_CHANNELS[1]} are accepted."
        )


def check_riff_length(data: bytes) -> None:
    """Raises BadMedia for a WAV file that is shorter than it states, which FFmpeg would accept as a shorter one.

    Recorders that do not know the length beforehand write zero, or the largest number."""
    stated = int.from_bytes(data[4:8], "little") + 8 if data.startswith(b"RIFF") else 0
    if len(data) < 0.98 * stated < 0.98 * RIFF_BYTES:
        raise BadMedia(f"the file is truncated: it states a size of {stated} bytes, and has {len(data)}.")


def seconds_stated(container: Any, stream: Any) -> float | None:
    """The length that the file states, where its format states it exactly."""
    if container.format.name.split(",")[0] not in ("flac", "mov") or stream.duration is None:
        return None
    return float(stream.duration * stream.time_base)


def seconds_held(container: Any, stream: Any, stated: float | None, length: int) -> float:
    """The length of the file's packets. Nothing is decoded."""
    begin = stream.start_time or 0
    ends = (
        packet.pts + packet.duration
        for packet in bounded_packets(container.demux(stream), length)
        if packet.pts is not None and packet.duration is not None
    )
    return float((max(ends, default=begin) - begin) * stream.time_base) or (stated or 0.0)


def audio_container_of(data: bytes) -> str:
    """FFmpeg's name of the format. Raises BadMedia for an unsupported one."""
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
    raise BadMedia(f"the file is not audio of a known format: {KNOWN_AUDIO}.")


FloatArray: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"

SAMPLE_RATE: Final = 16_000
"""Samples a second."""
MEL_HOP: Final = 160
MEL_SPAN: Final = 400
"""Samples that one frame is made of; a frame begins every `MEL_HOP`."""
FRAMES_A_SECOND: Final = SAMPLE_RATE // MEL_HOP
MEL_FLOOR: Final = 1e-10
MEL_RANGE: Final = 8.0
"""Powers of ten below the strongest band of a window that are distinguished."""


class MelFrames:
    """Mel frames of audio that arrives in chunks; the same however it is chunked.

    The audio is mirrored at its beginning and followed by silence, as in training.
    """

    def __init__(self, bands: int) -> None:
        self._filters = mel_filters(bands)
        self._window = np.hanning(MEL_SPAN + 1)[:-1].astype(np.float32)  # periodic
        self._pending: FloatArray | None = None

    def push(self, samples: FloatArray) -> FloatArray:
        """The frames that these samples complete, [frames, bands]: logarithms to the base ten."""
        if self._pending is None:
            # Mirroring needs a few samples; missing ones are silence.
            mirrored = np.pad(samples[: MEL_SPAN // 2 + 1], (0, max(0, MEL_SPAN // 2 + 1 - len(samples))))[:0:-1]
            samples = np.concatenate([mirrored, samples])
        else:
            samples = np.concatenate([self._pending, samples])
        count = max(0, 1 + (len(samples) - MEL_SPAN) // MEL_HOP)
        self._pending = samples[count * MEL_HOP :]
        if not count:
            return np.zeros((0, self._filters.shape[0]), np.float32)
        spans = np.lib.stride_tricks.sliding_window_view(samples, MEL_SPAN)[::MEL_HOP][:count]
        power = np.abs(np.fft.rfft(spans * self._window)) ** 2
        return np.log10(np.maximum(power.astype(np.float32) @ self._filters.T, MEL_FLOOR)).astype(np.float32)

    def end(self) -> FloatArray:
        """The frames that silence after the end completes, so that there is one for each whole `MEL_HOP`."""
        return self.push(np.zeros(MEL_SPAN // 2 - MEL_HOP, np.float32))


def normalize_mels(frames: FloatArray) -> FloatArray:
    """The frames of one window as a model takes them."""
    return (np.maximum(frames, frames.max() - MEL_RANGE) + 4.0) / 4.0


@cache
def mel_filters(bands: int) -> FloatArray:
    """The weights of frequencies in each band, [bands, frequencies], by Slaney's scale."""
    edges = _to_hertz(np.linspace(0, _to_mel(SAMPLE_RATE / 2), bands + 2))
    frequencies = np.fft.rfftfreq(MEL_SPAN, 1 / SAMPLE_RATE)
    slopes = edges[:, None] - frequencies[None, :]
    widths = np.diff(edges)[:, None]
    rising, falling = -slopes[:-2] / widths[:-1], slopes[2:] / widths[1:]
    area = 2.0 / (edges[2:] - edges[:-2])
    return (np.maximum(0.0, np.minimum(rising, falling)) * area[:, None]).astype(np.float32)


def _to_mel(frequency: float) -> float:
    """Linear up to 1 kHz, logarithmic above."""
    return 15.0 + 27.0 * np.log(frequency / 1000.0) / np.log(6.4)


def _to_hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < 15.0, mels * 200.0 / 3.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mels - 15.0)))
