from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, settings

pytestmark = pytest.mark.anyio


async def ask(method: str, path: str, engine: ScriptedEngine | None = None, **values: Any) -> Call:
    return await call(build_app(engine or ScriptedEngine(), settings()), method, path, **values)  # type: ignore[arg-type]


async def test_the_served_model_is_listed_under_its_own_name() -> None:
    made = await ask("GET", "/v1/models")
    assert [model["id"] for model in made.json()["data"]] == ["org/toy"]


@pytest.mark.parametrize("name", ["org/toy", "default"])
async def test_the_model_can_be_asked_for_by_either_name(name: str) -> None:
    assert (await ask("GET", f"/v1/models/{name}")).json()["id"] == "org/toy"


async def test_another_model_is_a_404_that_lists_what_is_served() -> None:
    made = await ask("GET", "/v1/models/gpt-4")
    assert (made.status, made.json()["error"]["code"]) == (404, "model_not_found")
    assert "org/toy" in made.json()["error"]["message"]


async def test_tokens_there_and_back() -> None:
    there = await ask("POST", "/v1/tokenize", body={"prompt": "Hé", "add_special_tokens": False})
    back = await ask("POST", "/v1/detokenize", body={"tokens": there.json()["tokens"]})
    assert (there.json()["count"], back.json()) == (3, {"prompt": "Hé"})


async def test_health_is_that_of_the_engine() -> None:
    engine = ScriptedEngine()
    engine.ready = False
    assert (await ask("GET", "/health/live", engine)).status == 200
    assert (await ask("GET", "/health/ready", engine)).status == 503
    engine.alive = False
    dead = await ask("GET", "/health/live", engine)
    assert (dead.status, dead.json()["ok"]) == (503, False)


async def test_an_unknown_path_is_a_404_that_names_the_nearest() -> None:
    made = await ask("POST", "/v1/chat/completion", body={})
    assert made.status == 404
    assert "/v1/chat/completions" in made.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/chat/completions/", "//v1/models", "/V1/models"])
async def test_a_path_is_taken_as_it_stands(path: str) -> None:
    assert (await ask("GET", path)).status in (404, 405)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD", "POST"}),
        ("PUT", "/v1/requests/x", {"GET", "HEAD", "DELETE"}),
        ("OPTIONS", "/v1/completions", {"POST"}),
        ("PUT", "/v1/models/org/toy/unload", {"POST"}),
        ("POST", "/", {"GET", "HEAD"}),
    ],
)
async def test_a_wrong_method_is_a_405_with_the_right_ones(method: str, path: str, allowed: set[str]) -> None:
    made = await ask(method, path)
    assert made.status == 405
    assert set(made.headers["allow"].split(", ")) == allowed
    assert made.json()["error"]["code"] == "method_not_allowed"


async def test_the_document_can_be_had_twice() -> None:
    app = build_app(ScriptedEngine(), settings())  # type: ignore[arg-type]
    first, second = [await call(app, "GET", "/openapi.json") for _ in range(2)]
    assert first.json() == second.json()
    assert set(first.headers) == set(second.headers)


async def test_the_page_is_served_with_a_strict_policy() -> None:
    made = await ask("GET", "/")
    assert made.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in made.headers["content-security-policy"]
    assert "unsafe" not in made.headers["content-security-policy"]
    again = await ask("GET", "/", headers={"if-none-match": made.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


async def test_the_files_of_a_page_are_fetched_once_for_each_version() -> None:
    page = await ask("GET", "/")
    [name, *others] = re.findall(rb'="(static/[0-9a-f]+/[^"]+)"', page.body)
    file = await ask("GET", f"/{name.decode()}")
    assert file.status == 200 and file.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert b'="static/' + name.split(b"/")[1] in page.body and page.body.count(b'="static/') == 1 + len(others)
    assert page.headers["cache-control"] == "no-cache"
    outdated = await ask("GET", "/static/0123456789abcdef/app.js")
    assert outdated.status == 404


async def test_files_of_the_page_are_not_logged_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ingot.http"):
        await ask("GET", "/static/app.js")
        assert caplog.records == []
        await ask("GET", "/static/nothing.js")
        assert len(caplog.records) == 1


async def test_the_head_of_the_page_has_no_body() -> None:
    made = await ask("HEAD", "/")
    assert made.status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/../page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e/__init__.py",
        "/static//etc/passwd",
        "/static/index.html\x00.js",
        "/static/",
        "/static/nothing.js",
    ],
)
async def test_no_path_leads_out_of_the_pages_folder(path: str) -> None:
    assert (await ask("GET", path)).status == 404
