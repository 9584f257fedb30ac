"""PDFs are drawn page by page, in a process that they may bring down, or refused in words."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from ingot.errors import BadMedia, BadRequest, Unavailable
from ingot.media import bounds, worker
from ingot.media.pdf import PdfFile, PdfPage, rendered_page_size
from ingot.protocol.anthropic.request import count_message_tokens, read_messages
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.responses.request import ResponseContext, read_response
from tests.media.pdfs import pdf
from tests.media.seeing import seeing

pytest.importorskip("pypdfium2")


def test_pages_have_their_sizes_before_anything_is_drawn() -> None:
    file = PdfFile.of(pdf((612, 792), (100, 50)))
    assert file.pages == ((1224, 1584), (200, 100))


def test_a_page_is_drawn_upright_in_its_size_and_colours() -> None:
    [pixels] = PdfPage(PdfFile.of(pdf((100, 50))), 0).frames()
    assert pixels.shape == (100, 200, 3) and pixels.dtype == np.uint8
    assert tuple(pixels[90, 10]) == (255, 0, 0) and tuple(pixels[5, 150]) == (255, 255, 255)


def test_a_turned_page_is_as_wide_as_it_is_shown() -> None:
    file = PdfFile.of(pdf((100, 50), rotate=90))
    [pixels] = PdfPage(file, 0).frames()
    assert file.pages[0] == (100, 200) and pixels.shape == (200, 100, 3)
    assert tuple(pixels[10, 10]) == (255, 0, 0)


def test_a_poster_is_drawn_in_fewer_pixels_to_an_inch() -> None:
    size = rendered_page_size((7200, 3600))
    assert 0.99 * bounds.PDF_PAGE_PIXELS < size.area <= bounds.PDF_PAGE_PIXELS and size.aspect == pytest.approx(2, 0.01)


def test_pages_are_told_apart_by_what_they_show() -> None:
    file, other = PdfFile.of(pdf((10, 10), (10, 10))), PdfFile.of(pdf((10, 10), drawn=b""))
    assert len({PdfPage(file, 0).digest, PdfPage(file, 1).digest, PdfPage(other, 0).digest}) == 3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no PDF"),
        (b"GIF89a", "no PDF"),
        (b"%PDF-1.7", "damaged"),
        (b"%PDF-1.7\n" + bytes(1000), "damaged"),
        (pdf()[:200], "damaged|no page"),
        (pdf(), "no page|damaged"),
        (pdf(*[(10, 10)] * (bounds.PDF_PAGES + 1)), "has 101 pages; at most 100"),
        (pdf((10_000, 1)), "at most 200 times"),
        (b"%PDF-" + bytes(bounds.PDF_BYTES), "at most"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_words(data: bytes, said: str) -> None:
    with pytest.raises(BadMedia, match=said):
        PdfFile.of(data)


SLOW = pdf((1000, 1000), drawn=b"0 0 1000 1000 re f " * 200_000)


def test_a_page_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PdfPage(PdfFile.of(SLOW), 0)
    monkeypatch.setattr(bounds, "DECODE_WALL_S", 0.0)
    with pytest.raises(BadMedia, match="took longer"):
        list(page.frames())


def test_a_page_that_takes_too_much_of_the_processor_ends_its_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    page, other = PdfPage(PdfFile.of(SLOW), 0), PdfPage(PdfFile.of(pdf((100, 100))), 0)
    monkeypatch.setattr(bounds, "PDF_CPU_S", 0.0)
    with pytest.raises(BadMedia, match="cannot be read"):
        list(page.frames())
    assert len(list(other.frames())) == 1


def test_a_server_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"ingot doctor"):
        PdfFile.of(pdf((10, 10)))


FILE = pdf((72, 144), (144, 72))
PLAIN = base64.b64encode(FILE).decode()
URL = f"data:application/pdf;base64,{PLAIN}"
DOCUMENT = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": PLAIN},
    "title": "A title",
}
GIVEN = {"type": "tool_result", "tool_use_id": "c1", "content": [DOCUMENT]}
CALL = {"type": "tool_use", "id": "c1", "name": "read", "input": {}}


def asked(name: str) -> Any:
    question: dict[str, Any] = {"role": "user", "content": "Read."}
    match name:
        case "messages":
            turns = [{"role": "user", "content": [DOCUMENT]}]
            return read_messages({"messages": turns, "max_tokens": 9}, seeing(), "msg_1").request
        case "address":
            block = {"type": "document", "source": {"type": "url", "url": URL}}
            turns = [{"role": "user", "content": [block]}]
            return read_messages({"messages": turns, "max_tokens": 9}, seeing(), "msg_1").request
        case "tool":
            turns = [question, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [GIVEN]}]
            return read_messages({"messages": turns, "max_tokens": 9}, seeing(), "msg_1").request
        case "chat":
            part = {"type": "file", "file": {"file_data": URL, "filename": "a.pdf"}}
            return read_chat({"messages": [{"role": "user", "content": [part]}]}, seeing(), "chatcmpl-1").request
        case _:
            part = {"type": "input_file", "file_data": URL}
            body = {"input": [{"role": "user", "content": [part]}]}
            return read_response(body, seeing(), "resp_" + "0" * 24, ResponseContext(None, {})).first.request


@pytest.mark.parametrize("name", ["messages", "address", "tool", "chat", "responses"])
def test_a_documents_pages_are_pictures_in_every_protocol(name: str) -> None:
    [media] = asked(name).media
    assert [(item.kind, item.layout.size) for item in media] == [("image", (128, 288)), ("image", (288, 128))]
    assert [frame.shape for item in media for frame in item.source.frames()] == [(288, 144, 3), (144, 288, 3)]


def test_the_count_of_tokens_holds_every_page() -> None:
    body = {"messages": [{"role": "user", "content": [DOCUMENT]}]}
    [prompt] = read_messages(body | {"max_tokens": 9}, seeing(), "msg_1").request.prompts
    assert count_message_tokens(body, seeing()).input_tokens == len(prompt)


def test_pages_count_as_pictures_of_the_request() -> None:
    many = base64.b64encode(pdf(*[(10, 10)] * 90)).decode()
    block = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": many}}
    turns = [{"role": "user", "content": [block] * 3}]
    with pytest.raises(BadRequest, match="at most 256"):
        read_messages({"messages": turns, "max_tokens": 9}, seeing(), "msg_1")
