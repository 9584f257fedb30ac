"""Models that the administrator adds while the server runs."""

from __future__ import annotations

import pytest

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser
ONE = {"id": "one", "kind": "chat", "state": "loaded", "max_model_len": 8192}


def opened(screen: Screen, server: ScriptedServer) -> None:
    server.models = [dict(ONE)]
    server.live["engines"] = []
    screen.open()
    screen.click("#model-name")
    screen.until(lambda: screen.find(".more-models").is_displayed())


def test_a_model_is_downloaded_by_name_and_its_progress_shown(screen: Screen, server: ScriptedServer) -> None:
    opened(screen, server)
    screen.fill(".more-models input", "org/new")
    screen.click(".more-models button")
    row = "#model-menu li:nth-child(2)"
    screen.until(lambda: "loading 50%" in screen.text(row))
    assert screen.find(f"{row} progress").get_property("value") == 0.5
    server.added.open()
    screen.until(lambda: "loaded" in screen.text(row))
    screen.click(f"{row} .choice")
    assert screen.text("#model-name") == "org/new"
    assert screen.complaints() == []


def test_why_a_model_could_not_be_had_is_told(screen: Screen, server: ScriptedServer) -> None:
    server.refused_model = "the hub cannot be reached"
    server.added.open()
    opened(screen, server)
    screen.fill(".more-models input", "org/new")
    screen.click(".more-models button")
    screen.until(lambda: screen.text("#notice") == "the hub cannot be reached")
    assert len(screen.all("#model-menu .choice")) == 1


def test_models_are_recommended_by_memory(screen: Screen, server: ScriptedServer) -> None:
    fitting = {"id": "qwen3-4b", "download_bytes": 2_300_000_000}
    server.recommended = [fitting | {"task": "chat"}, fitting | {"task": "code"}]
    server.added.open()
    opened(screen, server)
    screen.until(lambda: screen.find(".more-models details").is_displayed())
    screen.click(".more-models summary")
    assert [row.text for row in screen.all(".recommended li")] == ["qwen3-4b chat, code · 2.3 GB\nDownload"]
    screen.click(".recommended button")
    screen.until(lambda: len(screen.all("#model-menu .choice")) == 2)


def test_only_the_administrator_adds_models_and_only_where_models_come_and_go(
    screen: Screen, server: ScriptedServer
) -> None:
    server.models = [dict(ONE), ONE | {"id": "two"}]
    screen.open()
    screen.click("#model-name")
    screen.until(lambda: server.polls == 1)
    assert not screen.find(".more-models").is_displayed()


def test_an_answer_says_how_far_its_model_is_loaded(screen: Screen, server: ScriptedServer) -> None:
    server.models = [dict(ONE)]
    screen.open()
    server.models[0] |= {"state": "loading", "progress": 0.25}
    answer = server.answer("Hello.", held=True)
    screen.run("dispatchEvent(new Event('focus'))")
    screen.send("Hi")
    screen.click("#model-name")
    screen.until(lambda: screen.text(".answer .facts") == "Loading one… 25%")
    server.models[0] |= {"state": "loaded", "progress": None}
    answer.gate.open()
    screen.until(lambda: screen.state() == "done")
