"""Prompts that are warm before anybody asks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.engine.engine import Engine
from ingot.errors import ConfigError
from ingot.http.server import open_listener
from tests import talking
from tests.http.running import make_server, running
from tests.http.scripted import settings
from tests.talking import TOOLS, system, user

SYSTEM = "You serve warm answers, of as few words as you can. " * 4


@pytest.fixture(params=list(talking.KINDS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = talking.start(request.param)
    yield made
    made.check()
    made.close()


def until(happened: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(4000):
        if happened():
            return
        pause.wait(0.005)
    raise AssertionError("it never happened")


def ask(url: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    headers = more.pop("headers", {})
    body = {"messages": messages, "max_tokens": 2, "logit_bias": talking.LETTERS, **more}
    made = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert made.status_code == 200, made.text
    return made.json()


@pytest.mark.sampled(3)
def test_the_first_who_asks_finds_system_prompt_and_tools_computed(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ingot.warm")
    path = tmp_path / "warm.jsonl"
    path.write_text(json.dumps({"messages": [system(SYSTEM)], "tools": TOOLS}) + "\n" + json.dumps(SYSTEM) + "\n")
    with running(engine, settings(warm_prompts=path)) as url:
        until(lambda: "tokens are pinned" in caplog.text)
        both = [ask(url, [system(SYSTEM), user("Hello!")], tools=TOOLS), ask(url, [system(SYSTEM), user("Hello!")])]
    for answer in both:
        usage = answer["usage"]
        assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 60


@pytest.mark.sampled(3)
def test_each_tenant_gets_its_own(engine: Engine, tmp_path: Path) -> None:
    path, keys = tmp_path / "system.txt", tmp_path / "keys"
    path.write_text(SYSTEM)
    keys.write_text("ann-the-key\nbob-the-key\n")
    with running(engine, settings(warm_prompts=path, api_key_file=keys)) as url:
        until(lambda: not engine.status() and engine.kept.status("").totals.used_bytes > 0)
        for key in ("ann-the-key", "bob-the-key"):
            answer = ask(url, [system(SYSTEM), user("Hello!")], headers={"x-api-key": key})
            assert answer["ingot"]["cache"]["matched_tokens"] > len(SYSTEM)


@pytest.mark.parametrize("engine", ["append"], indirect=True)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([{"role": "nobody", "content": "x"}], "line 1: messages.0.role"),
        ({"messages": [{"role": "system", "content": "x"}], "tools": 3}, "line 1: tools"),
        ({"prompt": "x" * 5000}, "line 1: This request needs"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_stops_the_server_and_names_its_line(
    engine: Engine, tmp_path: Path, value: Any, words: str
) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text(json.dumps(value))
    chosen = settings(warm_prompts=path)
    listener = open_listener(chosen)
    try:
        with pytest.raises(ConfigError, match=words):
            make_server(engine, chosen, lambda url: None, listener)
    finally:
        listener.close()
