"""The page about the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.web.screen import Screen
from tests.web.scripted_server import ScriptedServer

pytestmark = pytest.mark.browser

PHASES = {"queued_s": 2.0, "prompt_s": 10.0, "answer_s": 20.0}
TOKENS = {"prompt_tokens": 100, "cached_tokens": 75, "completion_tokens": 40}
RUNNING = {
    "id": "chatcmpl-0123456789abcdef01234567",
    "phase": "decode",
    "prefilled_tokens": 100,
    "max_tokens": 64,
    "tokens_per_second": 12.5,
    "preemptions": 1,
    **PHASES,
    **TOKENS,
}
PAST = {"id": "cmpl-1", "path": "/v1/completions", "outcome": "ended", "ended_ago_s": 40.0, **PHASES, **TOKENS}
BRANCH = {"parent": None, "salt": "", "begin": 0, "end": 900, "uses": 7, "bytes": 5_200_000, "pinned": True}
TREE = [
    {**BRANCH, "on_disk": False, "more": 0},
    {**BRANCH, "parent": 0, "begin": 900, "end": 1000, "uses": 3, "pinned": False, "on_disk": True, "more": 4},
]


def engine(**totals: int) -> dict[str, Any]:
    counts = {"prompt_tokens": 400, "cached_tokens": 300, "generated_tokens": 0, "computed_tokens": 0, "steps": 1}
    return {
        "model": "toy",
        "device": "none",
        "formats": "float32",
        "running": 1,
        "waiting": 3,
        "totals": {**counts, "step_s": 0.0, "preemptions": 0, "refused": 0, **totals},
        "memory": {
            "budget_bytes": 8_000_000_000,
            "weight_bytes": 4_000_000_000,
            "state_bytes": 1_000_000_000,
            "held_bytes": 500_000_000,
            "active_bytes": 4_100_000_000,
            "used": 0.25,
            "owners": [{"owner": "anna", "kept_bytes": 300_000_000}],
        },
        "speculation": {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 15, "accepted_per_position": [9, 4, 2]},
    }


@pytest.fixture
def live(screen: Screen, server: ScriptedServer) -> Callable[[], Screen]:
    """Opens the page once the test has written what is to be told."""

    def opened() -> Screen:
        screen.visit("/live")
        screen.until(lambda: screen.text("#health-detail") != "Connecting…")
        return screen

    return opened


def test_it_draws_requests_memory_kept_prompts_draft_tokens_and_models(
    live: Callable[[], Screen], server: ScriptedServer
) -> None:
    server.live |= {"requests": [RUNNING], "past": [PAST], "engines": [engine()]}
    server.tree = TREE
    server.models = [{"id": "toy", "context_length": 8192}, {"id": "other", "state": "unloaded"}]
    screen = live()
    screen.until(lambda: len(screen.all("#models li")) == 2)
    assert screen.text("#health-detail") == "Ready"
    assert screen.find("#timeline").get_attribute("data-bars") == "2"
    assert "40 of 64 new tokens · 32.0 s · preempted 1×" in screen.text("#engine-requests li")
    assert (screen.text("#waiting"), screen.text("#running")) == ("3", "1")
    assert screen.text("#cached-share") == "75%"
    memory = screen.text("#memory")
    assert "Prompt cache, anna" in memory and "300 MB" in memory and "Of 8.0 GB" in memory
    assert "900 tokens · used 7× · 5.2 MB · pinned" in screen.text("#tree > li > p")
    assert "on disk · 4 more after it" in screen.text("#tree li li")
    assert "15 of 30 draft tokens accepted, 2.50 tokens per pass" in screen.text("#speculation")
    assert screen.text("#models li:nth-child(1)") == "toy loaded · 8,192 tokens"
    assert screen.text("#models li:nth-child(2)") == "other unloaded"
    assert screen.complaints() == []


def test_models_of_several_are_loaded_and_unloaded(live: Callable[[], Screen], server: ScriptedServer) -> None:
    server.live["engines"] = [engine()]
    server.models = [
        {"id": "org/talk", "kind": "chat", "state": "loaded", "max_model_len": 8192},
        {"id": "vectors", "kind": "embedding", "state": "unloaded"},
        {"id": "ears", "kind": "audio", "state": "loading", "progress": 0.25},
        {"id": "judge", "kind": "rerank", "state": "failed", "failure": "there is no file"},
    ]
    screen = live()
    screen.until(lambda: len(screen.all("#models li")) == 4)

    def row(at: int) -> str:
        return " ".join(screen.text(f"#models li:nth-child({at})").split())

    assert [row(at) for at in (1, 2, 3, 4)] == [
        "org/talk loaded · 8,192 tokens Unload",
        "vectors embedding · unloaded Load",
        "ears speech to text · loading 25%",
        "judge rerank · failed · there is no file Load",
    ]
    for at, text in ((2, "vectors embedding · loaded Unload"), (1, "org/talk unloaded · 8,192 tokens Load")):
        screen.find(f"#models li:nth-child({at}) button").click()
        screen.until(lambda at=at, text=text: row(at) == text)  # type: ignore[misc]
    assert server.changed == ["load vectors", "unload org/talk"]
    assert screen.complaints() == []


def test_models_are_not_to_be_changed_by_a_key_that_sees_only_its_own(
    live: Callable[[], Screen], server: ScriptedServer
) -> None:
    server.models = [{"id": "vectors", "kind": "embedding", "state": "unloaded"}]
    screen = live()
    screen.until(lambda: len(screen.all("#models li")) == 1)
    assert screen.text("#models li") == "vectors embedding · unloaded"


def test_the_engines_of_several_models_are_added_up(live: Callable[[], Screen], server: ScriptedServer) -> None:
    server.live["engines"] = [engine(), engine() | {"model": "other", "waiting": 1}]
    screen = live()
    assert (screen.text("#waiting"), screen.text("#running")) == ("4", "2")
    assert "Prompt cache, anna, other" in screen.text("#memory") and "8.0 GB" in screen.text("#memory")
    assert "30 of 60 draft tokens accepted" in screen.text("#speculation")


def test_tokens_a_second_are_what_the_counts_grew_by(live: Callable[[], Screen], server: ScriptedServer) -> None:
    server.live["engines"] = [engine()]
    screen = live()
    screen.until(lambda: server.polls >= 1)
    server.live["engines"] = [engine(generated_tokens=50, computed_tokens=9000, steps=4)]
    screen.until(lambda: float(screen.text("#answer-speed").replace(",", "")) > 5)
    screen.until(lambda: float(screen.text("#answer-speed").replace(",", "")) == 0)  # nothing came after that


def test_the_timeline_shows_each_phase_in_its_colour(live: Callable[[], Screen], server: ScriptedServer) -> None:
    server.live["past"] = [PAST | {"ended_ago_s": 0.0, "queued_s": 30.0, "prompt_s": 30.0, "answer_s": 60.0}]
    screen = live()
    colours = screen.run(
        """const canvas = document.getElementById('timeline');
        const context = canvas.getContext('2d');
        const at = (share) => context.getImageData(Math.round(canvas.width * share), 4, 1, 1).data.join();
        return [0.1, 0.3, 0.48, 0.7].map(at);"""
    )
    assert len(set(colours)) == 4 and not any(colour.endswith(",0") for colour in colours)


def test_an_answer_that_was_stopped_is_no_failed_one(live: Callable[[], Screen], server: ScriptedServer) -> None:
    """Three requests that ended now, each of them an answer for a minute: a row each, the oldest on top."""
    began = {"ended_ago_s": 0.0, "queued_s": 0.0, "prompt_s": 0.0}
    outcomes = ("ended", "cancelled", "overloaded")
    server.live["past"] = [
        PAST | began | {"outcome": outcome, "answer_s": 60.0 - number} for number, outcome in enumerate(outcomes)
    ]
    screen = live()
    rendered, legend = screen.run(
        """const canvas = document.getElementById('timeline');
        const context = canvas.getContext('2d');
        const ratio = devicePixelRatio || 1;
        const x = Math.round(canvas.width * 0.8);
        const at = (row) => [...context.getImageData(x, Math.round((row * 17 + 4) * ratio), 1, 1).data].slice(0, 3);
        const colour = (phase) => getComputedStyle(document.querySelector(`[data-phase=${phase}]`), '::before');
        const parts = (phase) => colour(phase).backgroundColor.match(/\\d+/g).map(Number);
        return [[0, 1, 2].map(at), ['answer', 'cancelled', 'failed'].map(parts)];"""
    )
    assert rendered == legend and len({*map(tuple, rendered)}) == 3


def test_a_key_that_is_not_the_administrators_sees_its_own_requests(
    live: Callable[[], Screen], server: ScriptedServer
) -> None:
    server.live["requests"] = [RUNNING]
    screen = live()
    assert screen.find("#only-own").is_displayed()
    assert not screen.find("#memory").is_displayed()
    screen.click(f"#engine-requests [aria-label='Cancel {RUNNING['id']}']")
    screen.until(lambda: server.cancelled == [RUNNING["id"]])


def test_it_asks_for_a_key_where_one_is_needed(screen: Screen, server: ScriptedServer) -> None:
    server.api_key = "open-sesame"
    screen.visit("/live")
    screen.until(lambda: screen.find("#key-dialog").is_displayed())
    screen.fill("#key-dialog-field", "open-sesame")
    screen.click("#key-dialog .primary")
    screen.until(lambda: screen.text("#health-detail") == "Ready")


@pytest.mark.parametrize("width", [320, 390, 900])
def test_it_fits_on_a_phone_in_both_themes(live: Callable[[], Screen], server: ScriptedServer, width: int) -> None:
    server.live |= {"requests": [RUNNING], "past": [PAST], "engines": [engine()]}
    server.tree = TREE
    screen = live()
    screen.resize(width, 800)
    for theme in ("light", "dark"):
        screen.prefer(prefers_color_scheme=theme)
        assert screen.run("return document.documentElement.scrollWidth <= innerWidth")


def test_the_chat_page_leads_there_and_back(screen: Screen, server: ScriptedServer) -> None:
    assert screen.find("#engine-more").get_attribute("target"), "it opens beside"
    screen.visit("/live")
    screen.until(lambda: screen.text("#health-detail") == "Ready")
    screen.click("header a")
    screen.until(lambda: screen.text("#model-name") == "smollm2-135m")


def test_a_button_measures_this_server(live: Callable[[], Screen], server: ScriptedServer) -> None:
    screen = live()
    screen.until(lambda: screen.all("#measure-model option"))
    screen.fill("#measure-streams", "1,2")
    screen.click("#measure button")
    screen.until(
        lambda: len(screen.all("#measure-result tbody tr")) == 2 and screen.text("#measure button") == "Measure"
    )
    rows = [row.text.split() for row in screen.all("#measure-result tbody tr")]
    assert [row[:3] for row in rows] == [["1", "4", "0"], ["2", "8", "0"]], "streams, done, failed"
    assert len({tuple(row) for row in rows}) == 2 and all(len(row) == 13 for row in rows)
    assert [svg.get_attribute("aria-label") for svg in screen.all("#measure-result svg")] == [
        "Throughput, tokens/s",
        "Time to first token, ms",
        "Time between tokens, ms",
    ]
    probes, warm_ups, requests = 2, 2, 4 + 8
    assert len(server.chats) == probes + warm_ups + requests
    assert {body["ignore_eos"] for body in server.chats} == {True}
    assert len({body["messages"][0]["content"] for body in server.chats}) == len(server.chats), "each prompt its own"


def test_two_models_are_compared_on_the_same_prompts(live: Callable[[], Screen], server: ScriptedServer) -> None:
    server.models = [{"id": "one", "max_model_len": 8}, {"id": "two", "max_model_len": 8}]
    screen = live()
    screen.until(lambda: screen.all("#compare-b option"))
    screen.fill("#compare-b-fields", '{"temperature": 1}')
    screen.fill("#compare-prompts", "First?\n\nSecond?")
    screen.click("#compare button")
    screen.until(
        lambda: len(screen.all("#compare-result tbody tr")) == 3 and screen.text("#compare button") == "Compare"
    )
    asked = [(body["model"], body["temperature"], body["messages"][0]["content"]) for body in server.chats]
    assert asked == [("one", 0, "First?"), ("two", 1, "First?"), ("one", 0, "Second?"), ("two", 1, "Second?")]
    first = screen.text("#compare-result tbody tr")
    assert "First?" in first and "one says so." in first and "two says so." in first and "tokens/s" in first
    screen.fill("#compare-a-fields", "temperature")
    screen.click("#compare button")
    screen.until(lambda: "JSON object" in screen.text("#notice"))


def test_a_server_that_is_not_ready_says_why(live: Callable[[], Screen], server: ScriptedServer) -> None:
    server.live |= {"ready": False, "detail": "draining"}
    assert live().text("#health-detail") == "draining"
