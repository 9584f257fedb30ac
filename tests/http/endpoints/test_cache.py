"""The kept prompts over HTTP, with a real engine behind the door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from ingot.http.edge import ClientGone
from ingot.http.endpoints import cache
from tests import engines
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, settings

PROMPT = list(range(1, 60))
ANN, BOB, ROOT = ({"x-api-key": f"{name}-the-key"} for name in ("ann", "bob", "root"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("ann-the-key\nbob-the-key\n")
    engine = engines.start("llama", cache_bytes=1 << 22)
    with (
        running(engine, settings(api_key_file=keys, admin_api_key="root-the-key")) as url,
        httpx.Client(base_url=url, timeout=60) as made,
    ):
        yield made
        engine.check()
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_kept(client: httpx.Client) -> None:
    for key in (ANN, BOB):
        assert client.delete("/v1/cache", headers=key).status_code == 200


def complete(client: httpx.Client, prompt: Any, key: dict[str, str] = ANN, **more: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
    made = client.post("/v1/completions", json=body, headers=key)
    assert made.status_code == 200, made.text
    return made.json()


def explained(client: httpx.Client, body: Any, key: dict[str, str] = ANN) -> Any:
    made = client.post("/v1/cache/explain", json=body, headers=key)
    assert made.status_code == 200, made.text
    return made.json()


def test_what_is_kept_is_counted_for_its_own_tenant(client: httpx.Client) -> None:
    complete(client, PROMPT)
    complete(client, [*PROMPT, 70, 71])
    ann = client.get("/v1/cache", headers=ANN).json()
    bob = client.get("/v1/cache", headers=BOB).json()
    assert (ann["hits"], ann["matched_tokens"]) == (1, 59)
    assert ann["salts"][0]["tokens"] >= 61 and ann["salts"][0]["bytes"] == ann["used_bytes"] > 0
    assert (bob["salts"], bob["hits"], bob["prompts"]) == ([], 0, 0)
    assert (bob["used_bytes"], bob["evictions"]) == (0, 0)


def test_the_totals_are_the_administrators_to_see(client: httpx.Client) -> None:
    complete(client, PROMPT)
    complete(client, PROMPT, BOB)
    told = [client.get("/v1/cache", headers=key).json() for key in (ANN, BOB, ROOT)]
    assert [("totals" in one) for one in told] == [False, False, True]
    assert told[2]["totals"]["tenants"] == 2
    assert told[2]["totals"]["used_bytes"] == told[0]["used_bytes"] + told[1]["used_bytes"] > told[2]["used_bytes"] == 0


def test_where_there_are_no_keys_everybody_sees_the_totals() -> None:
    with running(ScriptedEngine(), settings()) as url, httpx.Client(base_url=url) as own:
        assert own.get("/v1/cache").json()["totals"] == {"tenants": 1, "used_bytes": 200, "evictions": 3, "disk": None}


def test_tenants_share_nothing_and_are_told_nothing_of_each_other(client: httpx.Client) -> None:
    complete(client, PROMPT)
    again = complete(client, PROMPT, BOB)["ingot"]["cache"]
    assert (again["matched_tokens"], again["reason"], again["diverged"]) == (0, "unseen", None)


def test_another_salt_of_the_same_tenant_is_named_as_the_reason(client: httpx.Client) -> None:
    complete(client, PROMPT, cache_salt="blue")
    assert complete(client, PROMPT, cache_salt="red")["ingot"]["cache"]["reason"] == "salt"


def test_a_hint_about_caching_splits_nothing(client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 2}
    for key in ("one", "two"):
        made = client.post("/v1/chat/completions", json=chat | {"prompt_cache_key": key}, headers=ANN).json()
    assert made["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_explaining_tells_what_would_match_and_computes_nothing(client: httpx.Client) -> None:
    complete(client, PROMPT)
    edited = [*PROMPT[:30], 80, *PROMPT[31:]]
    before = client.get("/v1/cache", headers=ANN).json()
    told = explained(client, {"prompt": edited})
    assert client.get("/v1/cache", headers=ANN).json() == before
    assert (told["prompt_tokens"], told["cache"]["matched_tokens"], told["cache"]["reason"]) == (59, 30, "diverged")
    ran = complete(client, edited)["ingot"]["cache"]
    assert ran == told["cache"]
    assert told["cache"]["diverged"]["token"] == 30


def test_a_conversation_can_be_explained_too(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hello there"}]}
    assert explained(client, body)["cache"]["reason"] == "unseen"
    client.post("/v1/chat/completions", json=body | {"max_tokens": 2}, headers=ANN)
    assert explained(client, body)["cache"]["reason"] == "complete"
    assert explained(client, body | {"cache": "off"})["cache"]["reason"] == "off"


HI = [{"role": "user", "content": "hello there"}]
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": HI, "max_completion_tokens": 2},
    "/v1/completions": {"prompt": "hello there", "max_tokens": 2, "logprobs": 1},
    "/v1/messages": {"model": "default", "system": "Be brief.", "messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "hello there", "instructions": "Be brief.", "max_output_tokens": 16, "store": False},
    "/api/chat": {"model": "default", "messages": HI, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"model": "default", "prompt": "hello there", "options": {"num_predict": 2}, "stream": False},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_body_of_any_protocol_is_explained_as_what_it_would_be_there(client: httpx.Client, path: str) -> None:
    body = BODIES[path]
    assert explained(client, body)["cache"]["reason"] == "unseen"
    made = client.post(path, json=body, headers=ANN)
    assert made.status_code == 200, made.text
    told = explained(client, body)
    assert told["cache"]["reason"] == "complete"
    assert told["cache"]["matched_tokens"] == told["prompt_tokens"] - 1, "one is always computed"
    assert "ingot" not in told, "it knows every field"


def test_a_mistake_in_a_body_is_named_and_does_not_make_it_one_of_another_protocol(client: httpx.Client) -> None:
    made = client.post("/v1/cache/explain", json={"messages": HI, "max_completion_tokens": "many"}, headers=ANN)
    assert (made.status_code, made.json()["error"]["param"]) == (400, "max_completion_tokens")


def test_what_holds_no_prompt_is_refused_with_what_would(client: httpx.Client) -> None:
    for body in ({"n": 1}, [], {"model": "default", "prompt": "", "stream": False}):
        made = client.post("/v1/cache/explain", json=body, headers=ANN)
        assert made.status_code == 400 and "prompt" in made.json()["error"]["message"], made.text


def test_clearing_forgets_the_asking_tenants_and_no_others(client: httpx.Client) -> None:
    complete(client, PROMPT)
    complete(client, PROMPT, BOB)
    assert client.delete("/v1/cache", headers=ANN).json()["freed_bytes"] > 0
    assert explained(client, {"prompt": PROMPT})["cache"]["reason"] == "unseen"
    assert explained(client, {"prompt": PROMPT}, BOB)["cache"]["reason"] == "complete"


def test_a_body_without_a_prompt_cannot_be_explained(client: httpx.Client) -> None:
    assert client.post("/v1/cache/explain", json={"n": 1}, headers=ANN).status_code == 400


def test_several_prompts_are_explained_one_by_one(client: httpx.Client) -> None:
    complete(client, PROMPT)
    told = explained(client, {"prompt": [PROMPT, [90, 91]]})["cache"]
    assert [one["reason"] for one in told["prompts"]] == ["complete", "unseen"]
    assert told["reason"] == "several"


def test_what_is_kept_goes_out_as_a_file_and_comes_in_again(tmp_path: Path) -> None:
    from tests.engine.test_cache_admin import start

    engine = start("llama", tmp_path / "model")
    limits = settings(archive_key_file=tmp_path / "archive.key")
    with running(engine, limits) as url, httpx.Client(base_url=url, timeout=60) as own:
        complete(own, PROMPT)
        made = own.get("/v1/cache/export")
        assert made.headers["content-type"] == "application/octet-stream"
        own.delete("/v1/cache")
        headers = {"content-type": "application/octet-stream"}
        assert own.post("/v1/cache/import", content=made.content, headers=headers).json()["added_tokens"] >= len(PROMPT)
        assert explained(own, {"prompt": PROMPT})["cache"]["reason"] == "complete"
        damaged = own.post("/v1/cache/import", content=made.content[:-1] + b"x", headers=headers)
        assert (damaged.status_code, damaged.json()["error"]["code"]) == (400, "invalid_archive")
        assert own.post("/v1/cache/import", json={}).status_code == 415
    engine.close()


def test_a_file_may_be_larger_than_other_bodies_but_not_larger_than_is_allowed(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    limits = settings(max_body_bytes=10, max_import_bytes=100, archive_key_file=tmp_path / "archive.key")
    headers = {"content-type": "application/octet-stream"}
    with running(engine, limits) as url, httpx.Client(base_url=url, timeout=60) as own:
        statuses = [
            own.post("/v1/cache/import", content=b"x" * size, headers=headers).status_code for size in (50, 101)
        ]
        assert statuses == [400, 413]
        assert own.post("/v1/cache/import", content=b"kept", headers=headers).json() == {"added_tokens": 20}


@pytest.mark.anyio
async def test_an_export_that_is_read_too_slowly_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = [0.0], [0]
    monkeypatch.setattr(cache, "body_clock", lambda: now[0])

    async def send(message: Message) -> None:
        sent[0] += 1
        now[0] += 10.0

    send_paced = cache.send_at_pace(send)
    with pytest.raises(ClientGone):
        for _ in range(100):
            await send_paced({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
    assert sent[0] == 4
