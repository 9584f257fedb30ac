"""A server that was stopped and started again goes on with its conversations as if nothing had happened."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from ingot.http.service import GenerationService
from ingot.http.shared_state import SharedState
from tests import talking
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, settings
from tests.talking import system, user

SYSTEM = "You answer in letters that mean nothing to anybody else. " * 6


def ask(url: str, messages: list[dict[str, Any]], **more: Any) -> Any:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "logit_bias": talking.LETTERS, **more}
    made = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert made.status_code == 200, made.text
    return made.json()


@pytest.mark.parametrize("kind", list(talking.KINDS))
def test_the_next_turn_takes_everything_over_from_disk(kind: str, tmp_path: Path) -> None:
    history = [system(SYSTEM), user("Hello!")]
    own = settings(cache_dir=tmp_path)
    first = talking.start(kind, disk=tmp_path)
    with running(first, own) as url:
        result = ask(url, history)["choices"][0]["message"]
    first.close()
    history += [result, user("And then?")]
    second = talking.start(kind, disk=tmp_path)
    with running(second, own) as url:
        explained = httpx.post(f"{url}/v1/cache/explain", json={"messages": history}, timeout=60).json()
        answer = ask(url, history)
        cold = ask(url, history, cache="off")
        shown = httpx.get(f"{url}/v1/cache").json()
    second.close()
    assert explained["cache"]["tier"] == "disk"
    assert answer["ingot"]["cache"]["tier"] == "disk"
    assert answer["ingot"]["prompt"]["recalled"] == 1
    usage = answer["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 60
    assert answer["choices"][0]["message"]["content"] == cold["choices"][0]["message"]["content"]
    assert shown["disk"]["records"] > 0 and shown["totals"]["disk"]["hits"] == 1


def test_a_model_recalls_no_answers_of_another_with_the_same_vocabulary(tmp_path: Path) -> None:
    def recalled(source: str, *, keeps: bool = False) -> bool:
        engine: Any = ScriptedEngine()
        engine.card = replace(engine.card, source=source)
        chosen = settings(cache_dir=tmp_path)
        service = GenerationService(engine, chosen, SharedState(chosen), lambda: lambda: None)
        if keeps:
            service.served.answers.keep(b"a conversation", "", [1, 2, 3])
        found = service.served.answers.recall(b"a conversation")
        anyio.run(service.stop)
        return found is not None

    assert recalled("folder:one", keeps=True)
    assert recalled("folder:one") and not recalled("folder:two")


def once_pinned(url: str) -> Any:
    """What is kept, as soon as some of it is pinned."""
    pause = threading.Event()
    for _ in range(4000):
        found = httpx.get(f"{url}/v1/cache").json()
        if found["salts"] and found["salts"][0]["pinned_tokens"]:
            return found
        pause.wait(0.005)
    raise AssertionError("nothing was ever pinned")


def test_warm_prompts_are_read_and_not_computed_again(tmp_path: Path) -> None:
    prompts = tmp_path / "system.txt"
    prompts.write_text(SYSTEM)
    stored = tmp_path / "kept"
    own = settings(cache_dir=stored, warm_prompts=prompts)
    pinned = []
    for _ in range(2):
        engine = talking.start("hybrid", disk=stored)
        with running(engine, own) as url:
            pinned.append(once_pinned(url))
        engine.close()
    assert pinned[1]["salts"][0]["pinned_tokens"] == pinned[0]["salts"][0]["pinned_tokens"]
    assert pinned[0]["matched_tokens"] == 0
    assert pinned[1]["totals"]["disk"]["hits"] == 1
    assert pinned[1]["prompt_tokens"] - pinned[1]["matched_tokens"] < 40
