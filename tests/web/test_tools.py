"""Tools of MCP servers in the page, on a real server with a real MCP server, whose model follows a script."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from selenium import webdriver

pytest.importorskip("mcp", reason="the MCP SDK is not installed: it is the extra `mcp`")

from tests import scripted
from tests.clients.agents import serving
from tests.mcp import HERE
from tests.web.screen import Screen

pytestmark = pytest.mark.browser
SCRIPT = scripted.said(
    ("18 degrees", "It is 18 degrees."),
    ("did not allow", "Then not."),
    ("weather", scripted.call("tools__weather", city="Paris")),
    otherwise="Hello",
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mcp")
    command = {
        "command": sys.executable,
        "args": [str(HERE / "tool_server.py")],
        "env": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        "tools": ["weather"],
    }
    config = folder / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"tools": command}}))
    with serving(SCRIPT, folder, mcp_config=config) as found:
        yield found


@pytest.fixture
def screen(browser: webdriver.Chrome, url: str, tmp_path: Path) -> Screen:
    screen = Screen(browser, SimpleNamespace(url=url), tmp_path)  # type: ignore[arg-type]
    screen.open()
    screen.run("localStorage.setItem('ingot.titles', 'off')")
    screen.click("#settings-toggle")
    screen.until(lambda: screen.find("#tools-tools").is_displayed())
    return screen


def allow(screen: Screen, choice: str) -> None:
    set_to = (
        "const e = document.getElementById('tools-tools'); e.value = arguments[0]; e.dispatchEvent(new Event('change'))"
    )
    screen.run(set_to, choice)
    screen.click("#settings .close")


def calls(screen: Screen) -> list[str]:
    return [" ".join(call.text.split()) for call in screen.all(".call summary")]


def test_a_call_is_shown_with_its_arguments_and_made_once_it_is_allowed(screen: Screen) -> None:
    allow(screen, "always")
    screen.ask("The weather?")
    assert calls(screen) == ["tools: weather wants to be called"]
    assert '"city": "Paris"' in screen.text(".call")
    screen.click(".asked .primary")
    screen.until(lambda: screen.state() == "done" and screen.answers() == ["It is 18 degrees."])
    assert calls(screen) == ["tools: weather called"]
    screen.click(".call summary")
    assert "18 degrees in Paris" in screen.text(".call")
    screen.reload()
    assert calls(screen) == ["tools: weather called"]
    assert screen.ask("Thanks") == "Hello"
    assert calls(screen) == ["tools: weather called"], "what was allowed once is not called again"
    assert screen.complaints() == []


def test_the_model_is_told_of_a_call_that_was_refused(screen: Screen) -> None:
    allow(screen, "always")
    screen.ask("The weather?")
    screen.reload()  # the question is still there
    screen.click(".asked .secondary")
    screen.until(lambda: screen.state() == "done" and screen.answers() == ["Then not."])
    assert calls(screen) == ["tools: weather refused"]


def test_all_calls_can_be_allowed_and_none_is_offered_by_default(screen: Screen) -> None:
    screen.click("#settings .close")
    assert screen.find("#tools-tools").get_property("value") == ""
    screen.click("#settings-toggle")
    allow(screen, "never")
    assert screen.ask("The weather?") == "It is 18 degrees."
    assert calls(screen) == ["tools: weather called"]
