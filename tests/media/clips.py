"""Real clips, made by PyAV: each frame is as bright as its number says."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

av = pytest.importorskip("av")

WIDTH, HEIGHT = 64, 48
SAME = {"fflags": "+bitexact"}
"""Of FFmpeg: no random numbers in files."""


def filmed(
    count: int = 40,
    *,
    rate: int = 10,
    format: str = "mp4",
    codec: str = "mpeg4",
    gop: int = 12,
    turn: int = 0,
    step: int = 5,
    between: int = 0,
    options: dict[str, str] | None = None,
    times: Sequence[int] | None = None,
) -> bytes:
    """`between` frames may refer to ones that are shown after them; `times` are in thousandths of a second."""
    out = io.BytesIO()
    with av.open(out, "w", format=format, options=SAME) as container:
        stream = container.add_stream(codec, rate=rate, options={"bf": str(between), **(options or {})})
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = WIDTH, HEIGHT, "yuv420p", gop
        if times is not None:
            stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        if turn:
            stream.set_display_rotation(turn)
        for number in range(count):
            for packet in stream.encode(_frame(step * number % 250, None if times is None else times[number])):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


def brightness(frames: Any) -> list[int]:
    return [round(float(frame.mean())) for frame in frames]


def _frame(bright: int, time: int | None) -> Any:
    frame = av.VideoFrame.from_ndarray(np.full((HEIGHT, WIDTH, 3), bright, np.uint8), format="rgb24")
    if time is not None:
        frame.pts, frame.time_base = time, Fraction(1, 1000)
    return frame


HOLDERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl")
"""Boxes of an MP4 that hold boxes."""


def with_boxes(data: bytes, replaced: dict[bytes, bytes]) -> bytes:
    """An MP4 in which the boxes of these names say something else. What is behind its index keeps its place."""
    made, at = b"", 0
    while at < len(data):
        length, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        held = data[at + 8 : at + length]
        held = replaced.get(name, with_boxes(held, replaced) if name in HOLDERS else held)
        made += (8 + len(held)).to_bytes(4, "big") + name + held
        at += length
    return made


def indexed(data: bytes, chunks: int, samples: int, size: int) -> bytes:
    """An MP4 whose index says that it has so many chunks, all at one place, each of so many samples of that size."""
    place = data.index(b"mdat") + 4
    return with_boxes(
        data.replace(b"edts", b"free"),  # what would leave out all but the beginning
        {
            b"stsz": struct.pack(">III", 0, size, chunks * samples),
            b"stsc": struct.pack(">IIIII", 0, 1, 1, samples, 1),
            b"stco": struct.pack(">II", 0, chunks) + struct.pack(">I", place) * chunks,
            b"stts": struct.pack(">IIII", 0, 1, chunks * samples, 1024),
        },
    )
