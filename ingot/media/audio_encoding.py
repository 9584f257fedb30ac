"""Encoding audio as a stream: samples in, bytes of a format out. Only a codec's own look-ahead is buffered."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ingot.errors import Unsupported

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
