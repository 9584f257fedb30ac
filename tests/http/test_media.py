"""Pictures over HTTP, to an engine that says it is shown them: from the body to the engine's request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ingot.http.body import RequestBodies
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, settings
from tests.media.pictures import data_url, file_of
from tests.media.seeing import TIMED
from tests.templates.real import named

pytestmark = pytest.mark.anyio

PICTURE = file_of(64, 96)


def engine(processor: Any = TIMED) -> ScriptedEngine:
    return ScriptedEngine(tokenizer=named("qwen-3.5").tokenizer, processor=processor)


async def ask(query: ScriptedEngine, url: str, path: str = "/v1/chat/completions", **options: Any) -> Call:
    app = build_app(query, settings(**options))  # type: ignore[arg-type]
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return await call(app, "POST", path, body={"messages": [{"role": "user", "content": parts}]})


async def test_the_engine_gets_tokens_and_beside_them_what_they_stand_for() -> None:
    query = engine()
    assert (await ask(query, data_url(PICTURE))).status == 200
    [[item]] = query.requests[0].media
    assert (item.kind, item.grid, item.end - item.begin) == ("image", (1, 6, 4), 6)
    [frame] = item.source.frames()
    assert frame.shape == (96, 64, 3)


async def test_a_video_is_shown_by_the_responses_api_as_it_is_by_chat() -> None:
    pytest.importorskip("av")
    from tests.media.clips import filmed

    url = data_url(filmed(), "video/mp4")
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [video("video_url", {"url": url})]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [video("input_video", url)]}], "store": False}),
    ):
        query = engine()
        made = await call(build_app(query, settings()), "POST", path, body=body)  # type: ignore[arg-type]
        assert made.status == 200, made.body
        [[item]] = query.requests[0].media
        assert item.kind == "video" and item.end > item.begin


def video(kind: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "video_url": value}


async def test_an_engine_without_a_tower_is_never_asked_and_the_answer_names_the_model() -> None:
    for query, options in ((engine(None), {}), (engine(), {"text_only": True})):
        made = await ask(query, data_url(PICTURE), **options)
        assert (made.status, made.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert "org/toy is run on text alone" in made.json()["error"]["message"]
        assert not query.requests


async def test_a_file_that_is_no_image_is_a_400_with_its_place() -> None:
    made = await ask(engine(), data_url(b"<svg/>"))
    error = made.json()["error"]
    assert (made.status, error["code"], error["param"]) == (400, "invalid_media", "messages.0.content.0.image_url.url")


async def test_what_a_model_may_be_shown_is_listed() -> None:
    for query, accepted in ((engine(), ["text", "image", "video"]), (engine(None), ["text"])):
        app = build_app(query, settings())  # type: ignore[arg-type]
        assert (await call(app, "GET", "/v1/models")).json()["data"][0]["input_modalities"] == accepted
        shown = (await call(app, "POST", "/api/show", body={"model": "default"})).json()["capabilities"]
        assert ("vision" in shown) == (len(accepted) > 1)


async def test_the_openapi_document_describes_images_where_they_are_taken() -> None:
    for query, described in ((engine(), True), (engine(None), False)):
        app = build_app(query, settings())  # type: ignore[arg-type]
        assert ("file_data" in json.dumps((await call(app, "GET", "/openapi.json")).json())) == described


@pytest.fixture
def shelf() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(PICTURE if self.path == "/a.png" else b"")

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_an_image_is_fetched_from_a_host_that_the_settings_name(shelf: str) -> None:
    query = engine()
    made = await ask(query, f"{shelf}/a.png", media_hosts=("127.0.0.1",))
    assert made.status == 200 and query.requests[0].media[0][0].layout.features == 6
    gone = await ask(query, f"{shelf}/b.png", media_hosts=("127.0.0.1",))
    assert gone.status == 400 and "status 404" in gone.json()["error"]["message"]
    other = await ask(query, f"{shelf}/a.png", media_hosts=("example.org",))
    assert other.status == 400 and "--media-hosts" in other.json()["error"]["message"]
    none = await ask(query, f"{shelf}/a.png")
    assert none.status == 400 and "fetches nothing" in none.json()["error"]["message"]


async def test_the_bytes_of_a_body_count_as_long_as_its_images_are_held() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    bodies = RequestBodies(100)
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    for kept, held in ((True, 2), (False, 0)):
        async with bodies.reading(scope, receive) as body:
            body.release(kept=kept)
            assert (body.raw, bodies.held) == (b"", held)
        assert bodies.held == 0
