"""Speech on the page: dictated with a microphone, and answers read aloud, where the server can."""

from __future__ import annotations

import pytest

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser

CHAT = {"id": "smollm2-135m", "object": "model", "max_model_len": 8192}
EARS = {"id": "ears", "object": "model", "kind": "audio"}
MOUTH = {"id": "mouth", "object": "model", "kind": "speech"}


def opened(screen: Screen, server: ScriptedServer) -> None:
    server.models = [CHAT, EARS, MOUTH]
    screen.reload()
    screen.until(lambda: screen.find("#record").is_displayed())


def test_a_server_that_neither_hears_nor_speaks_offers_neither(screen: Screen) -> None:
    screen.ask("Hello")
    assert not screen.find("#record").is_displayed()
    assert not screen.all(".answer [aria-label='Read aloud']:not([hidden])")


def test_what_is_said_is_written_behind_what_stands_in_the_field(screen: Screen, server: ScriptedServer) -> None:
    opened(screen, server)
    screen.complaints()
    screen.find("#prompt").send_keys("Before. ")
    screen.click("#record")
    screen.until(lambda: screen.find("#record").get_attribute("aria-label") == "Stop recording")
    screen.click("#record")
    screen.until(lambda: screen.find("#prompt").get_property("value") == "Before. What was said.")
    [(model, sound)] = server.heard
    assert model == "ears" and sound[:4] == b"\x1aE\xdf\xa3"  # a WebM file, as Chromium records
    assert screen.find("#record").get_attribute("aria-label") == "Dictate" and screen.complaints() == []


def test_silence_is_said_to_be_nothing(screen: Screen, server: ScriptedServer) -> None:
    opened(screen, server)
    server.transcript = " "
    screen.click("#record")
    screen.until(lambda: screen.find("#record").get_attribute("aria-label") == "Stop recording")
    screen.click("#record")
    screen.until(lambda: "No speech was recognised" in screen.text("#notice"))
    assert screen.find("#prompt").get_property("value") == ""


def test_an_answer_is_read_without_its_markup_and_then_is_over(screen: Screen, server: ScriptedServer) -> None:
    opened(screen, server)
    screen.complaints()
    server.answer("Some **bold** words.")
    screen.ask("Hello")
    screen.tool(1, "Read aloud").click()
    screen.until(lambda: server.spoken and screen.tool(1, "Read aloud"))
    assert server.spoken == [{"model": "mouth", "input": "Some bold words.", "response_format": "pcm"}]
    assert screen.complaints() == []


def test_reading_can_be_stopped(screen: Screen, server: ScriptedServer) -> None:
    opened(screen, server)
    server.sound = None
    screen.ask("Hello")
    screen.tool(1, "Read aloud").click()
    screen.until(lambda: server.spoken)
    screen.tool(1, "Stop reading").click()
    screen.until(lambda: screen.tool(1, "Read aloud"))


def test_long_texts_are_cut_where_sentences_end(screen: Screen) -> None:
    cut = """
const done = arguments[arguments.length - 1];
import('/static/speaker.js').then(({ pieces }) => done(pieces(arguments[0]).map((piece) => piece.length)));
"""
    sentence = "Word " * 19 + "end. "
    lengths = screen.browser.execute_async_script(cut, sentence * 100)
    assert len(lengths) == 3 and max(lengths) <= 4000 and all((length + 1) % 100 == 0 for length in lengths)
    assert screen.browser.execute_async_script(cut, "x" * 9000) == [4000, 4000, 1000]
    assert screen.browser.execute_async_script(cut, "  ") == []
