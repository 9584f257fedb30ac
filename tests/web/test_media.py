"""Files on the page: picked, pasted or dropped, shown, sent with the message, and taken back; and the choice of the
model that takes them."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest
from selenium.webdriver import Keys

from tests.hearing import tone, wav
from tests.media.pdfs import pdf
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
    screen.until(lambda: screen.text("#model-name") == "seeing")


def pick(screen: Screen, folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(PICTURE)
    screen.find("#attach-files").send_keys("\n".join(str(folder / name) for name in names))
    screen.until(lambda: len(screen.all("#attachments img")) == len(names))


def test_what_a_model_does_not_take_is_said_with_what_would(screen: Screen, server: ScriptedServer) -> None:
    server.models.append(SEEING)
    screen.reload()
    screen.run(HAND_OVER, "paste", "#prompt", "clipboardData", data_url(PICTURE))
    screen.until(lambda: "smollm2-135m does not take cat.png: it reads no images. These do: seeing." in notice(screen))
    assert not screen.all("#attachments img")
    screen.click("#model-name")
    screen.click("#model-menu [data-model='seeing']")
    screen.run(HAND_OVER, "paste", "#prompt", "clipboardData", data_url(PICTURE))
    screen.until(lambda: screen.all("#attachments img"))
    assert "Takes images, videos and text" in screen.text(".welcome")


def notice(screen: Screen) -> str:
    return screen.text("#notice")


def test_the_choice_of_a_model_redraws_everything_and_survives_a_reload(screen: Screen, server: ScriptedServer) -> None:
    server.models.append(SEEING | {"max_model_len": 4096})
    screen.reload()
    screen.click("#model-name")
    screen.click("#model-menu [data-model='seeing']")
    for _ in range(2):
        assert screen.text("#model-name") == "seeing" and "4,096" in screen.text("#model")
        assert screen.text(".welcome h2") == "seeing" and '"model":"seeing"' in screen.text(".welcome .code")
        screen.reload()
    screen.ask("Hello")
    assert server.bodies[-1]["model"] == "seeing"


def test_models_are_loaded_and_unloaded_where_they_are_chosen(screen: Screen, server: ScriptedServer) -> None:
    server.live["engines"] = []
    server.models = [
        {"id": "one", "kind": "chat", "state": "loaded", "memory_bytes": 1_500_000_000},
        {"id": "two", "kind": "chat", "state": "loading", "progress": 0.25, "input_modalities": ["text", "image"]},
    ]
    screen.reload()
    screen.click("#model-name")
    screen.until(lambda: screen.all("[aria-label='Unload one']"))
    assert [row.text for row in screen.all("#model-menu .hint")] == ["loaded · 1.5 GB", "loading 25% · images"]
    assert screen.find("#model-menu progress:not([hidden])").get_attribute("value") == "0.25"
    server.models[1] |= {"state": "unloaded"}
    screen.until(lambda: screen.all("[aria-label='Load two']"))
    screen.click("[aria-label='Load two']")
    screen.until(lambda: screen.all("[aria-label='Unload two']"))
    assert server.changed == ["load two"]


def test_a_picked_image_is_shown_and_sent_before_the_words(
    screen: Screen, server: ScriptedServer, tmp_path: Path
) -> None:
    open_seeing(screen, server)
    screen.complaints()
    pick(screen, tmp_path, "cat.png")
    screen.ask("What is this?")
    [message] = server.bodies[-1]["input"]
    image = {"type": "input_image", "image_url": data_url(PICTURE)}
    assert message == {"role": "user", "content": [image, {"type": "input_text", "text": "What is this?"}]}
    screen.until(lambda: screen.run("return document.querySelector('.question img').naturalWidth") == 24)
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
    assert [part["type"] for part in server.bodies[-1]["input"][0]["content"]] == ["input_image"]


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
    assert [part["type"] for part in server.bodies[-1]["input"][0]["content"]] == ["input_image", "input_text"]


def test_a_large_photograph_stays_with_its_conversation(screen: Screen, server: ScriptedServer, tmp_path: Path) -> None:
    open_seeing(screen, server)
    (tmp_path / "large.bmp").write_bytes(file_of(1400, 1200, "bmp"))  # 5 MB
    screen.find("#attach-files").send_keys(str(tmp_path / "large.bmp"))
    screen.until(lambda: screen.all("#attachments img"))
    screen.ask("What?")
    screen.reload()
    screen.until(lambda: screen.run("return document.querySelector('.question img').naturalWidth") == 1400)
    screen.ask("And now?")
    assert len(server.bodies[-1]["input"][0]["content"][0]["image_url"]) > 6_000_000


def test_files_of_several_kinds_are_sent_as_the_model_takes_them(
    screen: Screen, server: ScriptedServer, tmp_path: Path
) -> None:
    server.models = [SEEING, {"id": "ears", "kind": "audio"}]
    screen.reload()
    files = {"code.py": b"x = '```'\n", "page.pdf": pdf((60, 60)), "beep.wav": wav(tone(0.1)), "junk.bin": b"\0\xff"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    screen.find("#attach-files").send_keys("\n".join(str(tmp_path / name) for name in files))
    screen.until(lambda: "junk.bin is no image, video, audio, PDF or text." in notice(screen))
    screen.until(lambda: len(screen.all("#attachments .medium")) == 3)
    screen.ask("Read these")
    code, document, sound, words = server.bodies[-1]["input"][0]["content"]
    assert code == {"type": "input_text", "text": "code.py:\n````\nx = '```'\n````"}
    assert (document["type"], document["filename"], document["file_data"][:28]) == (
        *("input_file", "page.pdf"),
        "data:application/pdf;base64,",
    )
    assert sound == {"type": "input_audio", "input_audio": {"data": b64encode(files["beep.wav"]).decode()}}
    assert words == {"type": "input_text", "text": "Read these"}
    assert screen.text(".question .media").startswith("code.py Text · 10 B")


def test_a_device_that_is_touched_offers_its_camera(screen: Screen, server: ScriptedServer, tmp_path: Path) -> None:
    server.models = [{"id": "eyes", "input_modalities": ["text", "image"]}]
    screen.open()
    assert not screen.find("#camera").is_displayed()
    screen.browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        screen.reload()
        assert screen.find("#camera").is_displayed()
        files = screen.find("#camera-files")
        assert (files.get_attribute("capture"), files.get_attribute("accept")) == ("environment", "image/*")
        (tmp_path / "photo.png").write_bytes(file_of(320, 240))
        files.send_keys(str(tmp_path / "photo.png"))
        screen.until(lambda: screen.all("#attachments img"))
        server.models[0]["input_modalities"] = ["text"]
        screen.reload()
        assert not screen.find("#camera").is_displayed()
    finally:
        screen.browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
