"""Clips of real files: sampled by time, turned as they were filmed, and refused by name where nothing is to be seen."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from ingot.errors import BadMedia
from ingot.media.clip import ClipFile, ClipFrames
from ingot.media.families.files import ProcessorFiles
from ingot.media.families.qwen import Qwen
from ingot.media.layout import ClipHeader, ClipWish
from ingot.media.picture import Picture
from ingot.media.size import Size
from tests.media.pictures import file_of

av = pytest.importorskip("av")


def filmed(
    count: int = 40,
    *,
    rate: int = 10,
    format: str = "mp4",
    codec: str = "mpeg4",
    gop: int = 12,
    turn: int = 0,
    step: int = 5,
) -> bytes:
    """Each frame is as bright as its number says."""
    out = io.BytesIO()
    with av.open(out, "w", format=format) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuv420p", gop
        if turn:
            stream.set_display_rotation(turn)
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), step * number % 250, np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


def brightness(frames: Any) -> list[int]:
    return [round(float(frame.mean())) for frame in frames]


@pytest.mark.parametrize(
    ("format", "codec"), [("mp4", "mpeg4"), ("mov", "mpeg4"), ("matroska", "mpeg4"), ("webm", "libvpx")]
)
def test_a_clips_header_says_how_large_and_how_long_it_is(format: str, codec: str) -> None:
    header = ClipFile.of(filmed(format=format, codec=codec)).header
    assert header.size == (64, 48) and header.fps == pytest.approx(10, abs=0.2) and abs(header.frames - 40) <= 1


@pytest.mark.parametrize("gop", [1, 12, 300])
def test_frames_are_those_that_were_asked_for(gop: int) -> None:
    clip = ClipFile.of(filmed(gop=gop))
    numbers = [0, 7, 7, 20, 39]
    assert brightness(clip.pick(numbers)) == pytest.approx([5 * number for number in numbers], abs=3)


def test_far_frames_are_found_by_keyframes_and_near_ones_by_going_on() -> None:
    clip = ClipFile.of(filmed(400, gop=30, step=20))
    numbers = [0, 3, 100, 101, 250, 399]
    assert brightness(clip.pick(numbers)) == pytest.approx([20 * number % 250 for number in numbers], abs=6)


def test_a_count_that_is_too_high_shows_the_last_frame_again() -> None:
    clip = ClipFile.of(filmed())
    lying = ClipFile(clip.data, ClipHeader(clip.header.size, 60, 10.0), 0, clip.digest)
    assert brightness(lying.pick([39, 50, 59])) == pytest.approx([195, 195, 195], abs=3)


@pytest.mark.parametrize("turn", [90, -90, 180])
def test_a_clip_stands_as_it_was_filmed(turn: int) -> None:
    clip = ClipFile.of(filmed(4, turn=turn))
    size = Size(64, 48) if turn == 180 else Size(48, 64)
    assert clip.header.size == size
    assert {frame.shape[:2] for frame in clip.pick([0, 3])} == {size[::-1]}


def sound() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"#EXTM3U\nhttp://localhost/secret", "no clip of a known format"),
        (b"ffconcat version 1.0\nfile /etc/passwd", "no clip of a known format"),
        (b"\0\0\0\x18ftypmp42" + bytes(40), "cannot be unpacked"),
        (b"\x1a\x45\xdf\xa3" + bytes(40), "cannot be unpacked|no pictures"),
        (b"", "no clip of a known format"),
    ],
)
def test_what_is_no_clip_is_refused_in_words(data: bytes, said: str) -> None:
    with pytest.raises(BadMedia, match=said):
        ClipFile.of(data)


def test_sound_alone_is_refused_by_name() -> None:
    with pytest.raises(BadMedia, match="only sound"):
        ClipFile.of(sound())


def test_a_cut_clip_is_shown_as_far_as_it_goes_or_refused() -> None:
    whole = filmed(format="matroska")
    clip = ClipFile.of(whole[: len(whole) * 2 // 3])
    with suppress(BadMedia):
        assert len(list(clip.pick([0, 10, 39]))) == 3


def test_one_frame_is_a_clip() -> None:
    clip = ClipFile.of(filmed(1))
    layout = Qwen.of(ProcessorFiles({"model_type": "qwen3_vl"})).clip(clip.header, ClipWish())
    assert layout.frames == (0, 0) and len(list(clip.pick(layout.frames))) == 2


def test_digests_name_the_frames_and_their_rate() -> None:
    one, two = Picture.of(file_of(8, 8)), Picture.of(file_of(8, 8, "bmp"))
    digests = {ClipFrames((one, two)).digest, ClipFrames((two, one)).digest, ClipFrames((one, two), 2.0).digest}
    assert len(digests) == 3 and ClipFrames((one, two)).digest in digests
