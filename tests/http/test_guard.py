"""Who may come in, case by case."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.http import guard
from ingot.http.server import open_listener
from ingot.http.tenants import Tenants
from ingot.shares import SharesPerSecond
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, settings

pytestmark = pytest.mark.anyio

KEY = "s3cret-key"


def app(**changes: Any) -> Any:
    return build_app(ScriptedEngine(), settings(**changes))  # type: ignore[arg-type]


async def get(path: str, *, headers: dict[str, str] | None = None, **changes: Any) -> Call:
    return await call(app(**changes), "GET", path, headers=headers)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LOCALHOST.", "[::1]:8000", "127.9.9.9"]
)
async def test_loopback_names_are_answered(host: str) -> None:
    assert (await get("/v1/models", headers={"host": host})).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "192.168.1.5",
        "[::2]",
    ],
)
async def test_a_name_that_was_rebound_to_this_machine_is_refused(host: str) -> None:
    made = await get("/v1/models", headers={"host": host})
    assert (made.status, made.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    "host",
    [
        "",
        "localhost:80@evil.example",
        "evil.example@localhost",
        "localhost:80:80",
        "localhost:x",
        "localhost/",
        "[::1",
        "::1",
    ],
)
async def test_a_host_that_is_more_or_less_than_a_name_and_a_port_is_refused(host: str) -> None:
    assert (await get("/v1/models", headers={"host": host})).status == 400


async def test_the_listening_name_and_the_allowed_ones_are_answered() -> None:
    assert (
        await get("/v1/models", host="box.lan", api_key=KEY, headers={"host": "box.lan:80", "x-api-key": KEY})
    ).status == 200
    assert (await get("/v1/models", allowed_hosts=("ai.home",), headers={"host": "ai.home"})).status == 200


async def test_a_server_on_every_address_answers_to_addresses_but_not_to_names() -> None:
    async def status(host: str) -> int:
        headers = {"host": host, "x-api-key": KEY}
        return (await get("/v1/models", host="0.0.0.0", api_key=KEY, headers=headers)).status

    assert await status("192.168.1.5:8000") == 200
    assert await status("evil.example") == 403


async def test_a_request_has_one_host() -> None:
    made = Call(app(), "GET", "/v1/models")
    made.scope["headers"].append((b"host", b"127.0.0.1"))  # type: ignore[union-attr]
    async with made:
        await made.done()
    assert made.status == 400


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "HTTP://127.0.0.1:8000", "https://127.0.0.1:8000"])
async def test_the_page_itself_may_call(origin: str) -> None:
    made = await get("/v1/models", headers={"host": "127.0.0.1:8000", "origin": origin})
    assert made.status == 200
    assert "access-control-allow-origin" not in made.headers


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8000", "file://", "http://[", "x"],
)
async def test_no_other_page_may_call(origin: str) -> None:
    made = await get("/v1/models", headers={"host": "127.0.0.1:8000", "origin": origin})
    assert made.status == 403
    assert "access-control-allow-origin" not in made.headers


async def test_a_preflight_is_refused_by_default() -> None:
    made = await call(
        app(), "OPTIONS", headers={"origin": "http://evil.example", "access-control-request-method": "POST"}
    )
    assert made.status == 403


async def test_an_origin_that_was_allowed_may_ask_and_call() -> None:
    origins = {"cors_origins": ("https://chat.example",), "api_key": KEY}
    asking = {
        "origin": "https://chat.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-lang",
    }
    made = await call(app(**origins), "OPTIONS", headers=asking)
    assert made.status == 204
    assert made.headers["access-control-allow-origin"] == "https://chat.example"
    assert made.headers["access-control-allow-headers"] == asking["access-control-request-headers"]
    refused = await call(app(**origins), "GET", "/v1/models", headers={"origin": "https://chat.example"})
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    assert "origin" in refused.headers["vary"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"x-api-key": ""},
        {"x-api-key": KEY + "x"},
        {"x-api-key": KEY[:-1]},
    ],
)
async def test_without_the_key_nothing_is_answered(headers: dict[str, str]) -> None:
    guarded = app(api_key=KEY)
    for method, path in [
        ("GET", "/v1/models"),
        ("GET", "/v1/requests"),
        ("DELETE", "/v1/requests/x"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/tokenize"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
        ("GET", "/health/livex"),
        ("POST", "/health/live"),
        ("POST", "/"),
    ]:
        made = await call(guarded, method, path, body={}, headers=headers)
        assert made.status == 401, (method, path)
        assert made.headers["www-authenticate"] == "Bearer"
        assert KEY.encode() not in made.body


@pytest.mark.parametrize(
    "headers", [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}]
)
async def test_either_header_may_carry_the_key(headers: dict[str, str]) -> None:
    assert (await get("/v1/models", api_key=KEY, headers=headers)).status == 200


async def test_a_request_holds_one_key() -> None:
    both = {"authorization": f"Bearer {KEY}", "x-api-key": KEY}
    assert (await get("/v1/models", api_key=KEY, headers=both)).status == 200
    refused = await get("/v1/models", api_key=KEY, headers=both | {"x-api-key": "another-key"})
    assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert "different" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready"])
async def test_how_much_is_going_on_is_told_only_to_who_has_a_key(path: str) -> None:
    assert set((await get(path, api_key=KEY)).json()) == {"ok", "detail"}
    assert set((await get(path, api_key=KEY, headers={"x-api-key": "wrong-key"})).json()) == {"ok", "detail"}
    assert (await get(path, api_key=KEY, headers={"x-api-key": KEY})).json()["running"] == 0
    assert (await get(path)).json()["running"] == 0


def test_a_key_is_not_so_short_that_it_is_soon_guessed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("long-enough\nx\n")
    for values in ({"api_key": "x"}, {"api_key_file": keys}, {"admin_api_key": "x"}):
        with pytest.raises(ConfigError, match="at least 8 characters"):
            open_listener(settings(**values))
    settings(api_key="x")  # which a client of another server may need


def test_a_key_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = tmp_path / "keys"
    keys.write_text("long-enough\n")
    keys.chmod(0o600)
    Tenants(settings(api_key_file=keys))
    assert caplog.records == []
    keys.chmod(0o640)
    Tenants(settings(api_key_file=keys))
    assert "chmod 600" in caplog.text and "long-enough" not in caplog.text


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/health/live", "/health/ready"])
async def test_the_page_and_the_probes_need_no_key(path: str) -> None:
    assert (await get(path, api_key=KEY)).status == 200
    assert (await call(app(api_key=KEY), "HEAD", path)).status == 200


async def test_a_body_that_says_it_is_too_large_is_refused_unread() -> None:
    made = await call(app(max_body_bytes=100), body={}, headers={"content-length": "101"})
    assert (made.status, made.headers["connection"]) == (413, "close")
    assert "100 bytes" in made.json()["error"]["message"]


async def test_a_body_is_counted_while_it_comes_in() -> None:
    assert (await call(app(max_body_bytes=100), body=b"[" * 101)).status == 413


@pytest.mark.parametrize("length", ["-1", "1e3", "", "٣", "9" * 5000])
async def test_a_length_that_is_no_number_is_refused(length: str) -> None:
    assert (await call(app(), body={}, headers={"content-length": length})).status in (400, 413)


async def test_every_answer_has_an_id_and_forbids_sniffing() -> None:
    for path in ("/v1/models", "/nowhere", "/", "/health/live"):
        made = await get(path)
        assert made.headers["x-request-id"].startswith("req-")
        assert made.headers["x-content-type-options"] == "nosniff"


@pytest.fixture
def floods_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FLOOD_DELAY_S", 0.0)


async def sent_from(app: Any, address: str, path: str, key: str | None = None) -> int:
    query = Call(app, "GET", path, headers={} if key is None else {"x-api-key": key})
    query.scope["client"] = (address, 1)
    async with query:
        return (await query.done()).status


async def test_a_budget_is_whole_again_a_second_later() -> None:
    now = [0.0]
    budget = SharesPerSecond("probes", 2, clock=lambda: now[0])
    assert [budget.take("here") for _ in range(3)] == [True, True, False]
    now[0] = 1.0
    assert [budget.take("here") for _ in range(3)] == [True, True, False]


async def test_addresses_without_number_take_no_more_than_twice_a_budget() -> None:
    budget = SharesPerSecond("probes", 4, clock=lambda: 0.0)
    assert sum(budget.take(f"from {number}") for number in range(100)) == 8


@pytest.mark.usefixtures("floods_are_refused_at_once")
async def test_a_flood_without_a_key_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    server = app(api_key=KEY)
    server.state.service.shared_state.unknown = SharesPerSecond("requests without a key", 1, clock=lambda: 0.0)
    with caplog.at_level("INFO"):
        for _ in range(50):
            await sent_from(server, "10.0.0.1", "/static/nothing.js")
    assert sum("10.0.0.1" in record.getMessage() for record in caplog.records) == 1
    assert len(caplog.records) < 5


async def test_whoever_asks_too_often_waits_for_its_refusal_and_nobody_else_does() -> None:
    server = app(api_key=KEY)
    server.state.service.shared_state.unknown = SharesPerSecond("requests without a key", 1, clock=lambda: 0.0)
    assert await sent_from(server, "10.0.0.1", "/v1/models") == 401
    refused = asyncio.create_task(sent_from(server, "10.0.0.1", "/v1/models"))
    assert await sent_from(server, "10.0.0.1", "/v1/models", KEY) == 200
    assert not refused.done()
    refused.cancel()
