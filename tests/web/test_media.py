"""Pictures and clips on the page: picked, pasted or dropped, shown, sent with the message, and taken back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selenium.webdriver import Keys

from tests.media.pictures import data_url, file_of
from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser

PICTURE = file_of(24, 16)
SEEING = {"id": "seeing", "object": "model", "max_model_len": 8192, "input_modalities": ["text", "image", "video"]}
HAND_OVER = """
const [type, target, field, url] = arguments;
const bytes = Uint8Array.from(atob(url.split(',')[1]), (letter) => letter.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], 'cat.png', { type: 'image/png' }));
const event = new Event(type, { bubbles: true, cancelable: true });
Object.defineProperty(event, field, { value: data });
document.querySelector(target).dispatchEvent(event);
"""


def open_seeing(screen: Screen, server: ScriptedServer) -> None:
    server.models = [SEEING]
    screen.reload()
    screen.until(lambda: screen.find("#attach").is_displayed())


def pick(screen: Screen, folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(PICTURE)
    screen.find("#attach-files").send_keys("\n".join(str(folder / name) for name in names))
    screen.until(lambda: len(screen.all("#attachments img")) == len(names))


def test_a_model_that_reads_text_alone_is_offered_nothing(screen: Screen, server: ScriptedServer) -> None:
    assert not screen.find("#attach").is_displayed()
    screen.run(HAND_OVER, "paste", "#prompt", "clipboardData", data_url(PICTURE))
    screen.until(lambda: "does not take cat.png" in screen.text("#notice"))
    assert not screen.all("#attachments img")


def test_a_picked_image_is_shown_and_sent_before_the_words(
    screen: Screen, server: ScriptedServer, tmp_path: Path
) -> None:
    open_seeing(screen, server)
    screen.complaints()
    pick(screen, tmp_path, "cat.png")
    screen.ask("What is this?")
    [message] = server.bodies[-1]["input"]
    image = {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}
    assert message == {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}
    assert screen.run("return document.querySelector('.question img').naturalWidth") == 24
    assert not screen.all("#attachments img") and screen.complaints() == []


@pytest.mark.parametrize(
    ("event", "target", "field"), [("paste", "#prompt", "clipboardData"), ("drop", "#transcript", "dataTransfer")]
)
def test_an_image_can_be_pasted_or_dropped_and_sent_without_a_word(
    screen: Screen, server: ScriptedServer, event: str, target: str, field: str
) -> None:
    open_seeing(screen, server)
    screen.run(HAND_OVER, event, target, field, data_url(PICTURE))
    screen.until(lambda: screen.all("#attachments img"))
    screen.ask("")
    assert [part["type"] for part in server.bodies[-1]["input"][0]["content"]] == ["image_url"]


def test_an_image_can_be_taken_back_before_it_is_sent(screen: Screen, server: ScriptedServer, tmp_path: Path) -> None:
    open_seeing(screen, server)
    pick(screen, tmp_path, "one.png", "two.png")
    screen.click("[aria-label='Remove one.png']")
    screen.until(lambda: len(screen.all("#attachments img")) == 1)
    screen.ask("This one.")
    assert len(server.bodies[-1]["input"][0]["content"]) == 2


def test_images_stay_with_their_message_when_it_is_edited_and_after_a_reload(
    screen: Screen, server: ScriptedServer, tmp_path: Path
) -> None:
    open_seeing(screen, server)
    pick(screen, tmp_path, "cat.png")
    screen.ask("What?")
    screen.reload()
    screen.until(lambda: screen.all(".question img"))
    screen.tool(0, "Edit message").click()
    screen.find(".editor textarea").send_keys(" Really?", Keys.ENTER)
    screen.until(lambda: screen.state() == "done" and screen.questions() == ["What? Really?"])
    assert [part["type"] for part in server.bodies[-1]["input"][0]["content"]] == ["image_url", "text"]


def test_a_conversation_is_kept_without_images_that_storage_has_no_room_for(
    screen: Screen, server: ScriptedServer, tmp_path: Path
) -> None:
    open_seeing(screen, server)
    screen.run("localStorage.setItem('filler', 'x'.repeat(5 * 1024 * 1024 - 3000))")
    (tmp_path / "large.bmp").write_bytes(file_of(64, 64, "bmp"))
    screen.find("#attach-files").send_keys(str(tmp_path / "large.bmp"))
    screen.until(lambda: screen.all("#attachments img"))
    screen.ask("What?")
    screen.run("localStorage.removeItem('filler')")
    stored = screen.run("return Object.keys(localStorage).filter((key) => key.startsWith('ingot.chat.'))")
    cached = json.loads(screen.run("return localStorage.getItem(arguments[0])", stored[0]))
    assert cached["messages"][0]["media"] == [{"kind": "image", "name": "large.bmp"}]
    screen.reload()
    screen.until(lambda: "large.bmp (not stored in this browser)" in screen.text(".question"))
