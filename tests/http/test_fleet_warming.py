"""Prompts that are warm before anybody asks, for models that come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.http.test_app import ASK, made, post

pytestmark = pytest.mark.anyio


def tables(file: Path) -> dict[str, Any]:
    return {"one": {"path": "a", "warm_prompts": str(file)}, "two": {"path": "b"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "system.txt"
    made.write_text("You serve warm answers.")
    return made


async def test_a_models_own_prompts_are_computed_once_it_is_loaded(file: Path) -> None:
    app, garage = made(tables(file))
    for name in ("one", "two"):
        answer = await post(app, "/v1/chat/completions", {"model": name, **ASK})
        assert answer.status == 200, answer.body
    assert [request.pin for request in garage.engines["one"].requests] == [True, False]
    assert [request.pin for request in garage.engines["two"].requests] == [False]


async def test_a_model_that_goes_leaves_what_it_was_warming(file: Path) -> None:
    app, garage = made(tables(file))
    garage.silent.add("one")
    assert (await post(app, "/v1/models/one/load")).status == 200
    [warming] = garage.engines["one"].streams
    assert not warming.closed.is_set()
    assert (await post(app, "/v1/models/one/unload")).status == 200
    assert warming.closed.is_set()
    assert garage.diary == ["+one", "-one"]


async def test_prompts_that_cannot_be_rendered_fail_the_load_in_words(tmp_path: Path) -> None:
    file = tmp_path / "warm.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "system", "content": "x"}], "tools": 3}) + "\n")
    app, garage = made(tables(file))
    answer = await post(app, "/v1/chat/completions", {"model": "one", **ASK})
    assert answer.status == 503 and b"one could not be loaded" in answer.body and b"line 1: tools" in answer.body
    assert garage.diary == ["+one", "-one"]
