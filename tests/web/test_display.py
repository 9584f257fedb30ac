"""How the page looks and moves: themes, widths, growing text, code."""

from __future__ import annotations

import pytest
from selenium.webdriver import Keys

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser

OVERFLOWING = """
const places = 'body, main, .bar, #transcript, #messages, .message, .prose > *, .dock, .panel:not([hidden]), #sidebar';
const isTooWide = (node) => node.matches('body, #transcript') && node.scrollWidth > node.clientWidth;
const isOutside = (node) => node.getBoundingClientRect().right > innerWidth + 1;
return [...document.querySelectorAll(places)]
  .filter((node) => isTooWide(node) || isOutside(node))
  .map((node) => node.outerHTML.slice(0, 80));
"""


def test_the_theme_follows_the_system_until_the_user_chooses(screen: Screen) -> None:
    def background() -> str:
        return str(screen.run("return getComputedStyle(document.body).backgroundColor"))

    screen.prefer(prefers_color_scheme="light")
    light = background()
    screen.prefer(prefers_color_scheme="dark")
    screen.until(lambda: background() != light)
    dark = background()
    screen.click("#theme-toggle")
    assert background() == light
    screen.reload()
    assert background() == light
    screen.click("#theme-toggle")
    assert background() == dark
    screen.prefer(prefers_color_scheme="light")
    screen.until(lambda: background() == light)


def test_the_model_and_its_context_are_named(screen: Screen) -> None:
    assert screen.text("#model-name") == "smollm2-135m"
    assert "8,192" in screen.text("#model")


def test_thinking_is_shown_apart_from_the_answer_and_sent_back(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("Forty-two.", thoughts=("<b>Hm", ", six by seven"), held=True)
    screen.send("What is it?")
    answer.gate.release(2)
    screen.until(lambda: "Thinking" in screen.text(".answer .thinking summary"))
    assert "going" in screen.run("return document.querySelector('.thinking').className")
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    assert screen.run("return document.querySelector('.thinking p').textContent") == "<b>Hm, six by seven"
    assert "six by seven" not in screen.text(".answer .prose")
    screen.reload()
    assert screen.run("return document.querySelector('.thinking p').textContent") == "<b>Hm, six by seven"
    screen.send("Sure?")
    screen.until(lambda: len(server.bodies) == 2)
    assert server.bodies[1]["input"][1]["content"] == [{"type": "reasoning_text", "text": "<b>Hm, six by seven"}]


def test_an_answer_without_thinking_shows_none(screen: Screen, server: ScriptedServer) -> None:
    server.answer("Yes.")
    screen.send("Is it?")
    screen.until(lambda: screen.state() == "done")
    assert screen.run("return document.querySelector('.thinking').hidden") is True


def test_finished_blocks_are_not_drawn_again(screen: Screen, server: ScriptedServer) -> None:
    pieces = ["First paragraph.\n\n", "```python\nx = 1\n", "y = 2\n", "```\n\n", "Last."]
    answer = server.answer(*pieces, held=True)
    screen.send("Go")
    answer.gate.release(2)
    screen.until(lambda: "x = 1" in screen.text(".answer .code pre"))
    screen.run("for (const node of document.querySelectorAll('.prose > *, .prose .tok-number')) node.kept = true")
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    stored = "return [...document.querySelectorAll('.prose > *')].map((node) => Boolean(node.kept))"
    assert screen.run(stored) == [True, True, False]
    assert screen.run("return document.querySelector('.prose .tok-number').kept") is True


def test_the_view_follows_the_text_until_the_user_scrolls_up(screen: Screen, server: ScriptedServer) -> None:
    def distance() -> float:
        script = "const t = document.getElementById('transcript'); return t.scrollHeight - t.scrollTop - t.clientHeight"
        return float(screen.run(script))

    lines = [f"Line {number} of a long answer.\n\n" for number in range(80)]
    answer = server.answer(*lines, held=True)
    screen.send("Write")
    answer.gate.release(40)
    screen.until(lambda: "Line 39" in screen.answers()[0])
    screen.until(lambda: distance() < 2)
    wheel = {"type": "mouseWheel", "x": 640, "y": 300, "deltaX": 0, "deltaY": -200}
    screen.browser.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)
    screen.until(lambda: distance() > 150)
    top = screen.run("return document.getElementById('transcript').scrollTop")
    answer.gate.release(20)
    screen.until(lambda: "Line 59" in screen.answers()[0])
    assert screen.run("return document.getElementById('transcript').scrollTop") == pytest.approx(top, abs=2)
    screen.click("#jump")
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    screen.until(lambda: distance() < 2)
    assert not screen.find("#jump").is_displayed()


def test_a_screen_reader_hears_blocks_rather_than_tokens(screen: Screen, server: ScriptedServer) -> None:
    answer = server.answer("One", " sentence.", "\n\n", "Then", " more.", held=True)
    screen.send("Go")

    def received() -> list[str]:
        return list(screen.run("return [...document.querySelectorAll('#announcer p')].map((p) => p.textContent)"))

    answer.gate.release(2)
    screen.until(lambda: screen.answers() == ["One sentence."])
    assert received() == ["Answering."]
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
    assert received() == ["Answering.", "One sentence.", "Then more."]
    assert screen.find("#announcer").get_attribute("aria-live") == "polite"


def test_a_narrow_screen_shows_everything_without_sideways_scrolling(screen: Screen, server: ScriptedServer) -> None:
    screen.resize(360, 740)
    server.answer(
        "# A heading that is rather long for such a narrow screen\n\n" + "unbreakable" * 30 + "\n\n",
        "```python\nvalue = '" + "x" * 200 + "'\n```\n\n",
        "| a | b | c | d | e | f |\n|-|-|-|-|-|-|\n|" + " some words here |" * 6 + "\n\n",
        "- item\n  - " + "y" * 120 + "\n\n> quote `" + "z" * 150 + "`\n\nhttps://example.com/" + "p" * 200,
    )
    screen.ask("w" * 120)

    def overflow() -> list[str]:
        return list(screen.run(OVERFLOWING))

    assert overflow() == []
    assert not screen.find("#sidebar").is_displayed()
    screen.click("#sidebar-toggle")
    assert screen.find("#sidebar").is_displayed()
    assert overflow() == []
    screen.press(Keys.ESCAPE)
    assert not screen.find("#sidebar").is_displayed()
    for panel in ("settings", "engine"):
        screen.click(f"#{panel}-toggle")
        assert overflow() == []
        screen.press(Keys.ESCAPE)
        assert not screen.find(f"#{panel}").is_displayed()


def test_no_motion_where_the_user_wants_none(screen: Screen, server: ScriptedServer) -> None:
    screen.prefer(prefers_reduced_motion="reduce")
    answer = server.answer("x", held=True)
    screen.send("Go")
    screen.until(lambda: screen.all(".answer.waiting"))
    moving = "return document.getAnimations().length"
    assert screen.run(moving) == 0
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")


def test_a_code_block_names_its_language_is_coloured_and_can_be_copied(screen: Screen, server: ScriptedServer) -> None:
    code = 'def greet(name):\n    # say it\n    return f"Hello {name}", 42'
    server.answer(f"Here:\n\n```python\n{code}\n```\n")
    screen.ask("Code")
    assert screen.text(".code .language") == "python"
    assert screen.run("return document.querySelector('.code code').textContent") == code
    for kind, text in {"keyword": "def", "call": "greet", "comment": "# say it", "number": "42"}.items():
        assert screen.text(f".code .tok-{kind}") == text
    permissions = {"origin": server.url, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    screen.browser.execute_cdp_cmd("Browser.grantPermissions", permissions)
    screen.click(".code [aria-label='Copy code']")
    screen.until(lambda: screen.all(".code [aria-label='Copied']"))
    read = "navigator.clipboard.readText().then(arguments[0])"
    assert screen.browser.execute_async_script(read) == code


def test_copying_works_without_the_clipboard_api(screen: Screen, server: ScriptedServer) -> None:
    screen.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    server.answer("Text to copy")
    screen.ask("Hello")
    screen.run("document.addEventListener('copy', () => { window.copied = document.activeElement.value; })")
    screen.tool(1, "Copy answer").click()
    screen.until(lambda: screen.all(".answer [aria-label='Copied']"))
    assert screen.run("return window.copied") == "Text to copy"
