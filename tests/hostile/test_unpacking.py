"""Files made to take the server's memory or time: a worker takes what it may, and the server and other keys go on."""

from __future__ import annotations

import io
import resource
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ingot.errors import BadMedia, Cancelled
from ingot.media import bounds, worker
from ingot.media.audio import AudioFile
from ingot.media.images import ImageFile
from ingot.media.layout import Size
from ingot.media.pdf import PdfFile, PdfPage
from ingot.media.video import VideoFile
from tests.hearing import tone, wav
from tests.media.clips import av, filmed, indexed
from tests.media.pdfs import pdf
from tests.media.pictures import Image, file_of, saved
from tests.media.test_audio import FORMS, encoded
from tests.waiting import WAIT_S

SMALL = Size(64, 64)
SLACK_MB = 48
"""What the server's process may grow by where others would take hundreds."""


def peak_mb() -> int:
    """The most memory that this process ever held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most >> (10 if sys.platform == "linux" else 20)


@contextmanager
def nothing_grows() -> Iterator[None]:
    """The server's process holds no more at any moment than before, and no job is left in the books."""
    before = peak_mb()
    yield
    assert peak_mb() - before < SLACK_MB
    for pool in (worker.header_pool, worker.pixel_pool, worker.audio_pool):
        assert pool.booked == 0


def test_an_index_of_twenty_million_frames_in_a_kilobyte_takes_no_memory_of_the_server() -> None:
    data = indexed(filmed(1), chunks=1, samples=20_000_000, size=1)
    assert len(data) < 1300
    with nothing_grows(), pytest.raises(BadMedia):
        VideoFile.of(data)


def test_an_index_of_twenty_million_packets_of_sound_takes_no_memory_of_the_server() -> None:
    data = indexed(encoded(*FORMS["m4a"], tone(0.1)), chunks=1, samples=20_000_000, size=1)
    with nothing_grows(), pytest.raises(BadMedia):
        AudioFile(data)


def test_a_sound_whose_index_names_the_same_bytes_again_and_again_is_refused() -> None:
    whole = encoded(*FORMS["m4a"], tone(1.0))
    first = int.from_bytes(whole[(at := whole.index(b"stsz") + 16) : at + 4], "big")
    data = indexed(whole, chunks=4000, samples=1, size=first)
    assert len(data) < 26_000
    with nothing_grows(), pytest.raises(BadMedia, match="far more than it has bytes for"):
        AudioFile(data)


def grey_png(side: int) -> bytes:
    """Of zeros, packed block by block: the blocks are alike, so that one is packed and then repeated."""
    lines = 100
    packer = zlib.compressobj(1)
    begin = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(lines * (side + 1))) + packer.flush(zlib.Z_FULL_FLUSH)
    total = side * (side + 1)
    packed = begin + block * (side // lines) + b"\x03\0" + struct.pack(">I", (total % 65521) << 16 | 1)
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held)) for name, held in chunks
    )


def clip_of(frame: bytes, said: int = 64) -> bytes:
    """A MOV of PNGs that says that they are so wide and high."""
    out = io.BytesIO()
    with av.open(out, "w", format="mov") as container:
        stream = container.add_stream("png", rate=1)
        stream.width = stream.height = said
        stream.pix_fmt = "gray"
        for number in range(2):
            packet = av.Packet(frame)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1)
            packet.is_keyframe = True
            container.mux(packet)
    return out.getvalue()


def test_a_clip_that_says_64_pixels_and_has_15000_is_refused_within_its_workers_memory() -> None:
    data = clip_of(grey_png(15_000))
    assert VideoFile.of(clip_of(grey_png(100), said=100)).header.size == (100, 100)
    with nothing_grows(), pytest.raises(BadMedia):
        VideoFile.of(data)


def test_a_codec_that_nobody_knows_is_refused_by_name() -> None:
    data = filmed(3, format="matroska")
    assert b"V_MPEG4/ISO/ASP" in data
    with pytest.raises(BadMedia, match="nobody here knows"):
        VideoFile.of(data.replace(b"V_MPEG4/ISO/ASP", b"V_NOBODY/KNOWS!"))


@pytest.mark.parametrize(
    "picture",
    [
        lambda: Image.new("RGBA", (4000, 4000), (10, 20, 30, 100)),
        lambda: Image.fromarray(np.full((4000, 4000), 257, np.uint16)),
    ],
    ids=["rgba", "grey of sixteen bits"],
)
def test_a_large_picture_is_unpacked_and_made_small_outside_of_the_server(picture: Callable[[], Any]) -> None:
    sent = ImageFile.of(saved(picture(), "png", compress_level=1))
    with nothing_grows():
        [frame] = sent.frames((SMALL,))
    assert frame.shape == (64, 64, 3)


def test_what_a_large_picture_takes_is_booked_before_it_is_unpacked() -> None:
    sent = ImageFile.of(saved(Image.new("L", (4000, 4000)), "png", compress_level=1))
    frames = sent.frames((SMALL,))
    booked: list[int] = []
    asking = worker.MediaClient(wanted=lambda: booked.append(worker.pixel_pool.booked) or True)  # type: ignore[func-returns-value]
    with worker.working_for(asking):
        next(frames)
    assert max(booked) > 12 * 4000 * 4000
    frames.close()  # type: ignore[attr-defined]
    assert worker.pixel_pool.booked == 0


def test_a_picture_that_takes_more_than_is_set_aside_is_refused_in_words() -> None:
    sent = ImageFile.of(saved(Image.new("L", (4000, 4000)), "png", compress_level=1))
    worker.pixel_pool.lend(100_000_000)
    try:
        with pytest.raises(BadMedia, match="Send a smaller one"):
            next(sent.frames((SMALL,)))
    finally:
        worker.pixel_pool.lend(-100_000_000)


# Keys beside each other

ENDLESS = pdf((1000, 1000), drawn=b"0 0 1000 1000 re f " * 100_000)


class Greedy:
    """A key that has pages drawn which take long, until its client leaves."""

    def __init__(self, count: int) -> None:
        self.left = threading.Event()
        self._threads = ThreadPoolExecutor(count)
        page = PdfPage(PdfFile(ENDLESS, (Size(2000, 2000),), b""), 0)
        self.pages: list[Future[None]] = [self._threads.submit(self._draw, page) for _ in range(count)]
        while worker.pixel_pool.booked == 0:  # until the first is at work
            self.left.wait(0.001)

    def _draw(self, page: PdfPage) -> None:
        with worker.working_for(worker.MediaClient("greedy", lambda: not self.left.is_set())):
            list(page.frames())

    def leave(self) -> None:
        self.left.set()
        for page in self.pages:
            with pytest.raises(Cancelled):
                page.result(WAIT_S)
        self._threads.shutdown()


def test_a_page_that_takes_long_keeps_no_other_keys_picture_waiting() -> None:
    greedy = Greedy(worker.WORKERS + 2)
    try:
        with worker.working_for(worker.MediaClient("polite")):
            [frame] = ImageFile.of(file_of(64, 64)).frames()
        assert frame.shape == (64, 64, 3)
        assert not any(page.done() for page in greedy.pages)
    finally:
        greedy.leave()


def test_who_leaves_has_its_workers_killed_and_its_memory_given_back() -> None:
    greedy = Greedy(2)
    greedy.leave()
    assert worker.pixel_pool.booked == 0 and not worker.pixel_pool._running.total and not worker.pixel_pool._waiting


def test_sounds_of_one_key_leave_workers_for_anothers() -> None:
    opened = []
    try:
        with worker.working_for(worker.MediaClient("greedy")):
            for _ in range(bounds.AUDIO_STREAMS // 2):
                samples = AudioFile(wav(tone(20))).samples()
                next(samples)
                opened.append(samples)
        with worker.working_for(worker.MediaClient("greedy", lambda: False)), pytest.raises(Cancelled):
            next(AudioFile(wav(tone(1))).samples())
        with worker.working_for(worker.MediaClient("polite")):
            assert sum(map(len, AudioFile(wav(tone(1))).samples())) == 16_000
    finally:
        for samples in opened:
            samples.close()  # type: ignore[attr-defined]
    assert worker.audio_pool.booked == 0
