"""The log as JSON: an object a line, whatever is logged, with the id of the request that it is about."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ingot.observe import logs
from ingot.observe.logs import JsonLines, RareWarning, current_request_id, log_facts
from tests import scripted
from tests.http.asgi import call
from tests.http.scripted import ScriptedEngine, build_app, settings


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Written:
    """What was logged so far."""

    def __init__(self) -> None:
        self.handler = logging.StreamHandler(io.StringIO())
        self.handler.setFormatter(JsonLines())

    def __call__(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.handler.stream.getvalue().splitlines()]


@pytest.fixture
def written() -> Iterator[Written]:
    log, made = logging.getLogger("ingot"), Written()
    before = log.level
    log.addHandler(made.handler)
    log.setLevel(logging.INFO)
    yield made
    log.removeHandler(made.handler)
    log.setLevel(before)


def test_a_line_is_one_object_whatever_its_words_are(written: Written) -> None:
    logging.getLogger("ingot.test").warning("two\nlines and a %s", '"quote"')
    [line] = written()
    assert (line["level"], line["logger"], line["message"]) == ("warning", "ingot.test", 'two\nlines and a "quote"')
    assert line["time"].endswith("+00:00") and "request_id" not in line


def test_what_went_wrong_is_told_with_its_traceback(written: Written) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("ingot.test").exception("failed", extra=log_facts("req-1", number={1, 2}))
    [line] = written()
    assert line["request_id"] == "req-1" and line["number"] == [1, 2]
    assert line["exception"].endswith("ValueError: no")


def test_what_is_logged_on_behalf_of_a_request_holds_its_id(written: Written) -> None:
    def work() -> None:
        current_request_id.set("req-2")
        logging.getLogger("ingot.test").info("hello")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    logging.getLogger("ingot.test").info("nobody's")
    first, second = written()
    assert first["request_id"] == "req-2" and "request_id" not in second


@pytest.mark.anyio
async def test_a_request_can_be_followed_by_its_id(written: Written) -> None:
    engine = scripted.start(lambda prompt: "Hello")
    try:
        made = await call(build_app(engine, settings()), body={"messages": [{"role": "user", "content": "a secret"}]})
    finally:
        engine.close()
    lines = [line for line in written() if line.get("request_id") == made.headers["x-request-id"]]
    assert [line["event"] for line in lines] == ["began", "ended", "answered"]
    began, ended, answered = lines
    assert began["path"] == "/v1/chat/completions" and began["prompt_tokens"] == ended["prompt_tokens"] > 0
    assert (ended["outcome"], ended["completion_tokens"], answered["status"]) == ("stop", 6, 200)
    assert ended["first_token_s"] <= ended["age_s"]
    assert "secret" not in json.dumps(written())


@pytest.mark.anyio
async def test_a_refusal_is_logged_with_its_id(written: Written) -> None:
    made = await call(build_app(ScriptedEngine(), settings()), body={"messages": "wrong"})
    [line] = written()
    assert (line["status"], line["request_id"]) == (400, made.headers["x-request-id"])


def test_what_comes_up_often_is_said_seldom_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    notice = RareWarning(logging.getLogger("ingot.test"), every_s=60.0)
    for _ in range(1000):
        notice.warn("no room for %s", "x")
    assert [record.getMessage() for record in caplog.records] == ["no room for x"]
    now = 161.0
    notice.warn("no room for %s", "y")
    assert caplog.records[-1].getMessage() == "no room for y (and 999 times more before)"
