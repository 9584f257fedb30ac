"""Pictures and clips that are broken, lie, or are made to do harm, sent to a server that sees: each is answered or
refused in words, and afterwards nothing is left of it."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bench.mutated_media import mutated, shown
from bench.soak.further_acts import transcription
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.media import worker
from tests.http.running import running
from tests.http.scripted import settings
from tests.http.scripted_hearing import HearingEngine
from tests.media.clips import filmed
from tests.media.pdfs import pdf
from tests.media.pictures import Image, data_url, drawn, file_of, saved, turned_file
from tests.media.test_clips import sound
from tests.media.test_images import png

pytest.importorskip("mlx_vlm")
MODEL = Path(__file__).parents[2] / "foundry" / "models" / "vision"
NAMED = {"invalid_media", "unsupported_parameter", "invalid_value", "context_length_exceeded"}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, httpx.Client]]:
    """No answer waits for an idle engine to look around by itself."""
    engine = start_engine(settings(), MODEL, name="vision", source="foundry")
    try:
        with pytest.MonkeyPatch.context() as patch, running(engine, settings()) as url:
            patch.setattr("ingot.engine.loop.BEAT_S", 100.0)
            with httpx.Client(base_url=url, timeout=60) as client:
                yield engine, client
    finally:
        engine.close()


def damaged(data: bytes, at: float = 0.6) -> bytes:
    """As long as it was, with noise from a place on."""
    begin = int(len(data) * at)
    return data[:begin] + np.random.default_rng(1).bytes(len(data) - begin)


def lying_about_frames(count: int) -> bytes:
    """An MP4 whose header says so many frames, and which has ten."""
    data = bytearray(filmed(10))
    at = data.index(b"stsz") + 12
    data[at : at + 4] = struct.pack(">I", count)
    return bytes(data)


def without_a_rate() -> bytes:
    data = bytearray(filmed(10))
    at = data.index(b"mdhd") + 16
    data[at : at + 4] = bytes(4)
    return bytes(data)


PICTURES: dict[str, bytes] = {
    "one pixel": file_of(1, 1),
    "one pixel high": file_of(120, 1),
    "200 to 1": file_of(600, 3),
    "201 to 1": file_of(603, 3),
    "sixteen bits": saved(Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)), "png"),
    "cmyk": saved(drawn(64, 64, "CMYK"), "jpeg"),
    "palette": saved(drawn(64, 64, "P"), "png"),
    "turned": turned_file(90, 30, 6),
    "truncated": file_of(200, 200, "jpeg")[:900],
    "damaged": damaged(file_of(200, 200, "png")),
    "bomb": png(60_000, 60_000, (b"IDAT", zlib.compress(bytes(1 << 22))), (b"IEND", b"")),
    "more than it says": png(64, 64, (b"IDAT", zlib.compress(bytes(1 << 24))), (b"IEND", b"")),
    "less than it says": png(64, 64, (b"IDAT", zlib.compress(bytes(9))), (b"IEND", b"")),
    "animated": saved(drawn(16, 16), "gif", save_all=True, append_images=[drawn(16, 16, "L")]),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>",
    "nothing": b"",
    "noise": np.random.default_rng(0).bytes(5000),
    "a clip": filmed(4),
}
CLIPS: dict[str, bytes] = {
    "one frame": filmed(1),
    "an uneven rate": filmed(20, times=[at * at * 7 + at for at in range(20)]),
    "sound": sound(),
    "too many frames by its header": lying_about_frames(4_000_000_000),
    "too few frames by its header": lying_about_frames(1),
    "no rate": without_a_rate(),
    "truncated": filmed(40)[:1500],
    "truncated behind its header": filmed(40, format="matroska")[:3000],
    "damaged": damaged(filmed(40, format="matroska")),
    "a list of files": b"ffconcat version 1.0\nfile /etc/passwd",
    "a playlist": b"#EXTM3U\nhttp://127.0.0.1/secret",
    "a picture": file_of(8, 8),
    "nothing": b"",
}
FILES: dict[str, bytes] = {
    "a page": pdf((100, 100)),
    "no page": pdf(),
    "damaged": damaged(pdf((100, 100), (10, 10)), 0.3),
    "a page without end": pdf((100, 100), drawn=b"q " * 100_000),
    "a page as long as a road": pdf((10_000, 1)),
    "a thousand pages": pdf(*[(10, 10)] * 1000),
    "a picture": file_of(8, 8),
    "nothing": b"",
}
PARTS: dict[str, dict[str, Any]] = {
    **{
        f"picture: {name}": {"type": "image_url", "image_url": {"url": data_url(data)}}
        for name, data in PICTURES.items()
    },
    **{
        f"clip: {name}": {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}, "max_frames": 8}
        for name, data in CLIPS.items()
    },
    **{
        f"file: {name}": {"type": "file", "file": {"file_data": data_url(data, "application/pdf")}}
        for name, data in FILES.items()
    },
    "no base64": {"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!!"}},
    "no address": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    "null": {"type": "image_url", "image_url": None},
}


def asked(client: httpx.Client, part: dict[str, Any], **more: Any) -> httpx.Response:
    content = [part, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0, **more}
    return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("name", PARTS)
def test_it_is_answered_or_refused_by_name(served: tuple[Engine, httpx.Client], name: str) -> None:
    engine, client = served
    if name.startswith("file:"):
        pytest.importorskip("pypdfium2")
    made = asked(client, PARTS[name])
    assert made.status_code in (200, 400), made.text
    if made.status_code == 400:
        error = made.json()["error"]
        assert error["code"] in NAMED and len(error["message"]) > 20, error
    assert engine.status() == []


def _threads() -> set[threading.Thread]:
    """Without those that the event loop hands work to, which are as many as were ever busy at once."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("AnyIO worker")}


def test_nothing_is_left_of_all_of_them(served: tuple[Engine, httpx.Client]) -> None:
    engine, client = served
    names = [name for name in PARTS if not name.startswith("file:")]
    for name in names:
        asked(client, PARTS[name])
    threads = _threads()
    for name in names:
        asked(client, PARTS[name])
    assert _threads() <= threads and engine.status() == []
    looks = engine._workload._vision
    assert looks is not None and not looks._encodings
    looks.check()


def test_a_picture_that_takes_more_memory_than_is_set_aside_is_refused_before_anything_is_unpacked(
    served: tuple[Engine, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, client = served
    monkeypatch.setattr(worker.pixel_pool, "_lent", 100_000_000)
    monkeypatch.setattr(worker.pixel_pool, "stream", lambda *given: pytest.fail("it was unpacked"))
    large = saved(Image.new("L", (4000, 4000)), "png", compress_level=1)
    made = asked(client, {"type": "image_url", "image_url": {"url": data_url(large)}})
    error = made.json()["error"]
    assert (made.status_code, error["code"]) == (413, "request_too_large")
    assert "at most 2343 by 2343, or serve the model with more --memory" in error["message"], error["message"]
    assert engine.status() == []


@pytest.mark.parametrize("begin", range(0, 30, 15))
def test_mutated_pictures_clips_and_pdfs_are_answered_or_refused(
    served: tuple[Engine, httpx.Client], begin: int
) -> None:
    engine, client = served
    files = [mutated(number) for number in range(begin, begin + 15)]
    for file in files:
        if not file.kind.startswith("audio"):
            made = client.post("/v1/chat/completions", json=shown(file))
            assert made.status_code in (200, 400, 413), made.text
    assert engine.status() == [] and worker.pixel_pool.booked == worker.header_pool.booked == 0


def test_mutated_sounds_are_heard_or_refused() -> None:
    files = [mutated(number) for number in range(60)]
    with running(HearingEngine(), settings()) as url, httpx.Client(base_url=url, timeout=60) as client:
        for file in files:
            if file.kind.startswith("audio"):
                raw, form = transcription("toy-ears", file.data)
                made = client.post("/v1/audio/transcriptions", content=raw, headers={"content-type": form})
                assert made.status_code in (200, 400), made.text


def test_a_stream_says_at_its_end_what_could_not_be_unpacked(served: tuple[Engine, httpx.Client]) -> None:
    _, client = served
    made = asked(client, PARTS["picture: truncated"], stream=True)
    assert made.status_code == 400 or "cannot be unpacked" in made.text, made.text
