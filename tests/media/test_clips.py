"""Clips of real files: sampled by time, turned as they were filmed, and refused by name where nothing is to be seen."""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadMedia
from ingot.media.containers import PacketRange, PacketTime, VideoPackets
from ingot.media.image_processors import QwenProcessor
from ingot.media.images import ImageFile
from ingot.media.layout import Size, VideoHeader, VideoLayoutOptions
from ingot.media.processor_parts import ProcessorFiles
from ingot.media.video import VideoFile, VideoFrames, decode_frames, read_video_packets
from tests.media.clips import brightness, filmed
from tests.media.pictures import file_of

av = pytest.importorskip("av")


@pytest.mark.parametrize(
    ("format", "codec"), [("mp4", "mpeg4"), ("mov", "mpeg4"), ("matroska", "mpeg4"), ("webm", "libvpx")]
)
def test_a_clips_header_says_how_large_and_how_long_it_is(format: str, codec: str) -> None:
    header = VideoFile.of(filmed(format=format, codec=codec)).header
    assert header.size == (64, 48) and header.fps == pytest.approx(10, abs=0.2) and abs(header.frames - 40) <= 1


@pytest.mark.parametrize("gop", [1, 12, 300])
def test_frames_are_those_that_were_asked_for(gop: int) -> None:
    clip = VideoFile.of(filmed(gop=gop))
    numbers = [0, 7, 7, 20, 39]
    assert brightness(clip.pick(numbers)) == pytest.approx([5 * number for number in numbers], abs=3)


def test_far_frames_are_found_by_keyframes_and_near_ones_by_going_on() -> None:
    clip = VideoFile.of(filmed(400, gop=30, step=20))
    numbers = [0, 3, 100, 101, 250, 399]
    assert brightness(clip.pick(numbers)) == pytest.approx([20 * number % 250 for number in numbers], abs=6)


KINDS: dict[str, dict[str, Any]] = {
    "long groups": {"codec": "libx264", "gop": 250},
    "short groups": {"codec": "libx264", "gop": 8},
    "frames between": {"codec": "libx264", "gop": 24, "between": 3},
    "a pyramid between": {"codec": "libx264", "gop": 40, "between": 7, "options": {"b-pyramid": "normal"}},
    "open groups": {"codec": "libx264", "gop": 12, "between": 3, "options": {"x264-params": "open-gop=1:bframes=3"}},
    "no keyframe but one": {"codec": "libx264", "options": {"x264-params": "intra-refresh=1:keyint=30"}},
    "mpeg4 between": {"between": 2},
    "matroska": {"codec": "libx264", "format": "matroska", "gop": 16, "between": 3},
    "hidden frames": {"codec": "libvpx", "format": "webm", "options": {"auto-alt-ref": "1", "lag-in-frames": "16"}},
    "vp9": {"codec": "libvpx-vp9", "format": "webm", "options": {"lag-in-frames": "16", "cpu-used": "8"}},
    "an uneven rate": {"codec": "libx264", "gop": 16, "between": 3, "times": [at * at * 3 + at for at in range(120)]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_is_the_one_that_decoding_everything_finds_at_its_time(kind: str) -> None:
    data = filmed(120, step=37, **KINDS[kind])
    clip = VideoFile.of(data)
    with av.open(io.BytesIO(data)) as container:
        every = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    begin = every[0][0]
    for numbers in ([0, 119], [3, 4, 5, 60, 61, 118], range(0, 120, 7), [50], range(120)):
        times = [(number - 0.5) / clip.header.fps + begin for number in numbers]
        expected = [next((pixels for at, pixels in every if at >= time), every[-1][1]) for time in times]
        for found, right in zip(clip.pick(numbers), expected, strict=True):
            assert np.array_equal(found, right), numbers


def test_of_far_frames_only_what_leads_to_them_is_decoded() -> None:
    packets = VideoPackets([PacketTime(at, at % 30 == 0, True) for at in range(18_000)])
    ranges = packets.ranges(packets.at(at * 285.7) for at in range(63))
    assert sum(stretch.end - stretch.begin for stretch in ranges) < 63 * 31


@given(
    packets=st.lists(st.builds(PacketTime, st.integers(0, 60), st.booleans(), st.booleans()), min_size=1, max_size=60),
    times=st.lists(st.floats(-5, 70), min_size=1, max_size=20),
)
def test_whatever_is_asked_for_is_decoded_once_behind_its_keyframe(packets: Any, times: list[float]) -> None:
    if not any(packet.shown for packet in packets):
        with pytest.raises(BadMedia, match="no frame"):
            VideoPackets(packets)
        return
    clip = VideoPackets(packets)
    wanted = [clip.at(time) for time in sorted(times)]
    ranges = clip.ranges(wanted)
    for one, following in pairwise(ranges):
        assert one.end <= following.begin
    assert [time for stretch in ranges for time in stretch.times] == sorted({packets[at].time for at in wanted})
    for at in wanted:
        [stretch] = [each for each in ranges if each.begin <= at < each.end]
        known = [each for each in packets[stretch.begin : at + 1] if each.key and each.time <= packets[at].time]
        assert known or stretch.begin == 0


def test_keyframes_are_shown_where_they_are_asked_for_and_only_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[int] = []
    ranges = VideoPackets.ranges

    def counted(self: VideoPackets, wanted: Iterable[int]) -> list[PacketRange]:
        found = ranges(self, wanted)
        decoded.extend(stretch.end - stretch.begin for stretch in found)
        return found

    monkeypatch.setattr(VideoPackets, "ranges", counted)
    clip = VideoFile.of(filmed(120, gop=12, codec="libx264", step=2, options={"x264-params": "scenecut=0"}))
    assert clip.keyed.keys == tuple(range(0, 120, 12))
    shown = QwenProcessor.of(ProcessorFiles({"model_type": "qwen3_vl"})).video_layout(
        clip.keyed, VideoLayoutOptions(frames=8)
    )
    assert shown.frames == (0, 12, 36, 48, 72, 84, 96, 119)
    assert shown.times[1] == (36 + 48) / 2 / 10  # of what is shown, not of what was asked for
    frames = decode_frames(clip.data, read_video_packets(clip.data), clip.header, 0, shown.frames)
    assert brightness(frames) == pytest.approx([2 * number for number in shown.frames], abs=6)
    assert decoded == [1] * 7 + [12]


def test_a_count_that_is_too_high_shows_the_last_frame_again() -> None:
    clip = VideoFile.of(filmed())
    lying = VideoFile(clip.data, VideoHeader(clip.header.size, 60, 10.0), 0, clip.digest)
    assert brightness(lying.pick([39, 50, 59])) == pytest.approx([195, 195, 195], abs=3)


@pytest.mark.parametrize("turn", [90, -90, 180])
def test_a_clip_stands_as_it_was_filmed(turn: int) -> None:
    clip = VideoFile.of(filmed(4, turn=turn))
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
        (b"#EXTM3U\nhttp://localhost/secret", "not a video of a known format"),
        (b"ffconcat version 1.0\nfile /etc/passwd", "not a video of a known format"),
        (b"\0\0\0\x18ftypmp42" + bytes(40), "cannot be unpacked"),
        (b"\x1a\x45\xdf\xa3" + bytes(40), "cannot be unpacked|no video"),
        (b"", "not a video of a known format"),
    ],
)
def test_what_is_no_clip_is_refused_in_words(data: bytes, said: str) -> None:
    with pytest.raises(BadMedia, match=said):
        VideoFile.of(data)


def test_sound_alone_is_refused_by_name() -> None:
    with pytest.raises(BadMedia, match="only audio"):
        VideoFile.of(sound())


def test_a_cut_clip_is_shown_as_far_as_it_goes_or_refused() -> None:
    whole = filmed(format="matroska")
    clip = VideoFile.of(whole[: len(whole) * 2 // 3])
    with suppress(BadMedia):
        assert len(list(clip.pick([0, 10, 39]))) == 3


def test_one_frame_is_a_clip() -> None:
    clip = VideoFile.of(filmed(1))
    layout = QwenProcessor.of(ProcessorFiles({"model_type": "qwen3_vl"})).video_layout(
        clip.header, VideoLayoutOptions()
    )
    assert layout.frames == (0, 0) and len(list(clip.pick(layout.frames))) == 2


def test_digests_name_the_frames_and_their_rate() -> None:
    one, two = ImageFile.of(file_of(8, 8)), ImageFile.of(file_of(8, 8, "bmp"))
    digests = {VideoFrames((one, two)).digest, VideoFrames((two, one)).digest, VideoFrames((one, two), 2.0).digest}
    assert len(digests) == 3 and VideoFrames((one, two)).digest in digests
