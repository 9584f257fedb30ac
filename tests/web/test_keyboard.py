"""The page without a mouse."""

from __future__ import annotations

import pytest
from selenium.webdriver import Keys

from tests.waiting import WAIT_S
from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser

MARKED = """
const node = document.activeElement;
const visible = (style) => style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
const box = node.id === 'prompt' ? document.getElementById('composer') : node;
return visible(getComputedStyle(node)) || getComputedStyle(box).boxShadow.includes('0px 0px 0px 1px');
"""


def tab_stops(screen: Screen, most: int = 80) -> dict[str, bool]:
    """Everything the Tab key reaches, once around, and whether the focus could be seen there."""
    stops: dict[str, bool] = {}
    for _ in range(most):
        screen.press(Keys.TAB)
        name = screen.focused()
        if name in stops and screen.run("return document.activeElement !== document.body"):
            break
        stops[name] = bool(screen.run(MARKED))
    return stops


def test_a_whole_conversation_needs_no_mouse(screen: Screen, server: ScriptedServer) -> None:
    assert screen.focused() == "prompt"
    screen.press("Hello", Keys.ENTER)
    screen.until(lambda: screen.answers() == ["You said: Hello"])
    answer = server.answer("Stop", " me", held=True)
    screen.press("Go on", Keys.ENTER)
    answer.gate.release()
    screen.until(lambda: screen.answers()[-1] == "Stop")
    screen.press(Keys.ESCAPE)
    screen.until(lambda: screen.state() == "stopped")
    assert answer.disconnected.wait(WAIT_S)
    screen.press(Keys.ARROW_UP)
    screen.until(lambda: screen.focused() == "Edit message")
    screen.press(" now", Keys.ENTER)
    screen.until(lambda: screen.answers()[-1] == "You said: Go on now")
    assert screen.focused() == "prompt"


def test_every_control_is_reached_with_a_visible_focus(screen: Screen, server: ScriptedServer) -> None:
    server.answer("```python\nx = 1\n```\n\n[link](https://example.com)")
    screen.ask("Hello")
    stops = tab_stops(screen)
    expected = {
        *("new-chat", "sidebar-toggle", "engine-toggle", "settings-toggle", "theme-toggle", "transcript", "prompt"),
        *("Edit message", "Copy message", "Delete message", "Copy answer", "Retry", "Delete answer"),
        *("More for Hello", "Hello", "Copy code", "Code, python", "link", "Skip to the message field"),
    }
    assert expected <= set(stops)
    assert [name for name in expected if not stops[name]] == []


def test_a_panel_takes_the_focus_and_gives_it_back(screen: Screen) -> None:
    screen.run("document.getElementById('settings-toggle').focus()")
    screen.press(Keys.ENTER)
    assert screen.focused() == "settings-title"
    stops = tab_stops(screen)
    assert {"system", "sampling-reset", "sampling-temperature", "sampling-seed", "key"} <= set(stops)
    screen.run("document.getElementById('key').focus()")
    screen.press(Keys.ESCAPE)
    assert screen.focused() == "settings-toggle"


def test_the_conversation_menu_works_with_arrows(screen: Screen) -> None:
    screen.ask("Alpha")
    screen.run("document.querySelector('#conversations .more').focus()")
    screen.press(Keys.ENTER)
    assert screen.focused() == "Rename"
    screen.press(Keys.ARROW_UP)
    assert screen.focused() == "Delete"
    screen.press(Keys.ARROW_DOWN)
    assert screen.focused() == "Rename"
    screen.press(Keys.ESCAPE)
    assert screen.focused() == "More for Alpha"
    screen.press(Keys.ENTER, Keys.ENTER)
    screen.press("Omega", Keys.ENTER)
    assert screen.text("#conversations .title") == "Omega"
    assert screen.focused() == "Omega"


def test_the_key_dialog_can_be_left_with_escape(screen: Screen, server: ScriptedServer) -> None:
    screen.open()
    server.api_key = "k"
    screen.press("Hello", Keys.ENTER)
    screen.until(lambda: screen.focused() == "key-dialog-field")
    screen.press(Keys.ESCAPE)
    screen.until(lambda: screen.state() == "failed")
    assert not screen.find("#key-dialog").is_displayed()
