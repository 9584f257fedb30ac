"""Adapters from a request's names to its receipt and the server's metrics, with the real engine in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.engine.engine import Engine
from tests import engines
from tests.equality.test_adapters import written
from tests.http.running import running
from tests.http.scripted import settings
from tests.waiting import WAIT_S

PROMPT = list(range(5, 25))
BASE = "tiny-llama"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return written(tmp_path_factory.mktemp("adapters"), "llama")


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[Engine]:
    made = engines.start("llama", cache_bytes=1 << 26, loras={name: folders[name] for name in ("one", "two")})
    yield made
    made.close()


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with running(engine, settings(allow_runtime_lora_updating=True)) as url, httpx.Client(base_url=url) as made:
        yield made


def complete(client: httpx.Client, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    made = client.post("/v1/completions", json=body | fields, timeout=60)
    assert made.status_code == 200, made.text
    return made.json()


def text(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def test_an_adapter_is_chosen_by_its_name_behind_its_models_or_by_the_field(client: httpx.Client) -> None:
    base, one = complete(client), complete(client, model="one")
    assert text(base) != text(one) and base["model"] == BASE and one["model"] == "one"
    assert "adapter" not in base["ingot"] and one["ingot"]["adapter"] == "one"
    for named in ({"model": f"{BASE}:one"}, {"adapter": "one"}, {"model": "one", "adapter": "one"}):
        found = complete(client, **named)
        assert (text(found), found["ingot"]["adapter"]) == (text(one), "one")
    assert text(complete(client, model="two")) != text(one)


def test_every_protocol_takes_one(client: httpx.Client) -> None:
    output = [{"role": "user", "content": "ab"}]
    query: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": output, "max_tokens": 2},
        "/v1/messages": {"messages": output, "max_tokens": 2},
        "/v1/responses": {"input": "ab", "max_output_tokens": 2, "store": False},
        "/api/chat": {"messages": output, "stream": False, "options": {"num_predict": 2}},
        "/api/generate": {"prompt": "ab", "stream": False, "options": {"num_predict": 2}},
    }
    for path, body in query.items():
        for named in ({"model": "two"}, {"adapter": "two"}):
            made = client.post(path, json=body | named, timeout=60)
            assert made.status_code == 200, made.text
            assert made.json()["ingot"]["adapter"] == "two", path


def test_what_is_not_there_is_a_404_that_lists_what_is(client: httpx.Client) -> None:
    for fields in ({"model": "three"}, {"model": f"{BASE}:three"}, {"adapter": "three"}, {"model": "other:one"}):
        made = client.post("/v1/completions", json={"prompt": "ab"} | fields)
        assert made.status_code == 404, fields
        assert "'one', 'two'" in made.json()["error"]["message"]
    made = client.post("/v1/completions", json={"prompt": "ab", "model": "one", "adapter": "two"})
    assert made.status_code == 400 and made.json()["error"]["param"] == "adapter"


def test_adapters_are_listed_with_their_parent(client: httpx.Client) -> None:
    listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert [listed[name].get("parent") for name in (BASE, "one", "two")] == [None, BASE, BASE]
    assert listed["two"]["rank"] == 5
    assert client.get(f"/v1/models/{BASE}:one").json() == listed["one"]


def test_adapters_come_and_go(client: httpx.Client, folders: dict[str, Path]) -> None:
    query = {"lora_name": "late", "lora_path": str(folders["three"])}
    made = client.post("/v1/load_lora_adapter", json=query)
    assert (made.status_code, made.json()["status"], made.json()["rank"]) == (200, "loaded", 6)
    assert complete(client, model="late")["model"] == "late"
    assert client.post("/v1/load_lora_adapter", json=query).status_code == 400
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).json()["status"] == "unloaded"
    assert client.post("/v1/completions", json={"prompt": "ab", "model": "late"}).status_code == 404
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 404
    for name in (BASE, "a:b", "default"):
        assert client.post("/v1/load_lora_adapter", json=query | {"lora_name": name}).status_code == 400
    gone = client.post("/v1/load_lora_adapter", json=query | {"lora_path": "/nowhere"})
    assert gone.status_code == 400 and "/nowhere" not in gone.text


def test_nobody_changes_adapters_where_that_is_not_allowed(engine: Engine) -> None:
    keys = {"api_key": "a-tenants-key", "admin_api_key": "the-admins-key"}
    query = {"lora_name": "late", "lora_path": "/nowhere"}
    with running(engine, settings(**keys)) as url, httpx.Client(base_url=url) as client:
        refusals = [
            client.post("/v1/load_lora_adapter", json=query, headers={"x-api-key": key}) for key in keys.values()
        ]
    assert [each.status_code for each in refusals] == [403, 403]
    assert "--allow-runtime-lora-updating" in refusals[1].json()["error"]["message"]


def test_an_adapter_can_be_what_requests_go_through_that_name_none(engine: Engine, folders: dict[str, Path]) -> None:
    with running(engine, settings(adapter_path=folders["two"])) as url, httpx.Client(base_url=url) as client:
        assert complete(client)["ingot"]["adapter"] == "two"
        assert complete(client, model="one")["ingot"]["adapter"] == "one"


def test_routers_are_told_which_adapters_run(client: httpx.Client) -> None:
    def result() -> str:
        lines = client.get("/metrics").text.splitlines()
        return next(line for line in lines if line.startswith("vllm:lora_requests_info{"))

    until = time.monotonic() + WAIT_S
    while 'running_lora_adapters=""' not in (line := result()) and time.monotonic() < until:
        time.sleep(0.01)  # whoever was just answered may still be among them
    assert 'max_lora="8"' in line and 'running_lora_adapters=""' in line and 'waiting_lora_adapters=""' in line
