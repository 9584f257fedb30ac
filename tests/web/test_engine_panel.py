"""The live view of the engine."""

from __future__ import annotations

import pytest

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser


def test_the_engine_panel_shows_what_runs_and_can_cancel_it(screen: Screen, server: ScriptedServer) -> None:
    busy = {"prompt_tokens": 100, "max_tokens": 50, "age_s": 1.5, "preemptions": 0}
    reading = {
        "id": "req-1",
        "phase": "prefill",
        "prefilled_tokens": 25,
        "completion_tokens": 0,
        "tokens_per_second": 0,
    }
    writing = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "phase": "decode",
        "prefilled_tokens": 100,
        "completion_tokens": 10,
    }
    server.requests = [busy | reading, busy | writing | {"tokens_per_second": 12.5}]
    server.health = (200, {"ok": True, "detail": "stepping", "running": 2, "queued": 0})
    screen.click("#engine-toggle")
    screen.until(lambda: len(screen.all("#engine-requests li")) == 2)
    assert "Ready" in screen.text("#engine-health")
    assert "2 running" in screen.text("#engine-health")
    assert "25 of 100 prompt tokens" in screen.text("#engine-requests li:nth-child(1)")
    assert "12.5 tokens/s" in screen.text("#engine-requests li:nth-child(2)")
    assert screen.run("const p = document.getElementById('engine'); return p.scrollWidth <= p.clientWidth")
    screen.click("#engine-requests [aria-label='Cancel req-1']")
    screen.until(lambda: len(screen.all("#engine-requests li")) == 1)
    assert server.cancelled == ["req-1"]
    server.health = (503, {"ok": False, "detail": "the engine thread has not stepped for 40 s"})
    screen.until(lambda: "Not ready" in screen.text("#engine-health"))
    assert "not stepped" in screen.text("#engine-health")


def test_the_engine_is_asked_only_while_its_panel_is_open(screen: Screen, server: ScriptedServer) -> None:
    screen.hurry()
    assert server.polls == 0
    screen.click("#engine-toggle")
    screen.until(lambda: server.polls >= 2)
    screen.click("#engine .close")
    seen = server.polls
    # Polls come each second, or what the page takes for one: in more than two an open panel would have asked twice.
    screen.run("window.waited = false; setTimeout(() => { window.waited = true; }, 2200)")
    screen.until(lambda: screen.run("return window.waited"))
    assert server.polls <= seen + 1  # one may have been under way when the panel closed
