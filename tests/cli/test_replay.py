"""Captured requests, of each protocol, run again: the same tokens, or where they part."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.cli import replay
from ingot.cli.replay import (
    answer_differences,
    answer_texts,
    read_capture,
    replay_notes,
    replayed_body,
    with_captured_settings,
)
from ingot.config import ModelEntry, load_config, with_name
from ingot.engine.engine import Engine
from ingot.engine.loading.model_loader import ModelLoader
from ingot.engine.request import Request
from ingot.errors import ConfigError
from tests import scripted
from tests.http.asgi import call
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, build_app, hello, settings
from tests.http.scripted_encoders import EncodingEngine

HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI, "stream": True},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
    "/api/chat": {"model": "default", "messages": HI},
    "/api/generate": {"model": "default", "prompt": "hi", "options": {"temperature": 0.5}},
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def captured(folder: Path, path: str, body: Any, engine: Any = None) -> dict[str, Any]:
    """What a server wrote of a request."""
    app = build_app(engine or ScriptedEngine(), settings(capture=folder, max_sequences=4))
    made = await call(app, path=path, body=body, headers={"authorization": "Bearer a-secret"})
    await app.state.service.stop()
    assert made.status == 200
    [written] = folder.glob("*.json")
    assert "a-secret" not in written.read_text()
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    found: dict[str, Any] = json.loads(written.read_text())
    assert found["id"] == made.headers["x-request-id"]
    return found


@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_of_each_protocol_is_captured_and_comes_again_with_its_seed(path: str, tmp_path: Path) -> None:
    engine = ScriptedEngine()
    record = await captured(tmp_path / "first", path, BODIES[path], engine)
    assert record["body"] == BODIES[path] and record["path"] == path
    assert record["answers"][0]["text"] == "Hello, world"
    assert record["settings"] == {"max_sequences": 4}
    again = await captured(tmp_path / "again", path, replayed_body(record), engine)
    first, second = engine.requests
    assert second.sampling == first.sampling and first.sampling.seed is not None
    assert again["prompts"] == record["prompts"] and not replay_notes(record, again)
    assert answer_differences(record, again) == [None]


ENCODINGS = {
    "/v1/embeddings": {"input": ["ab", "c"]},
    "/v1/rerank": {"query": "q", "documents": ["a", "bb"]},
    "/v2/rerank": {"query": "q", "documents": ["a", "bb"]},
    "/api/embed": {"model": "default", "input": ["ab", "c"]},
    "/api/embeddings": {"model": "default", "prompt": "ab"},
}


@pytest.mark.anyio
@pytest.mark.parametrize("path", ENCODINGS)
async def test_vectors_and_scores_are_captured_and_come_again(path: str, tmp_path: Path) -> None:
    record = await captured(tmp_path / "first", path, ENCODINGS[path], EncodingEngine())
    assert (record["body"], record["path"]) == (ENCODINGS[path], path)
    again = await captured(tmp_path / "again", path, replayed_body(record), EncodingEngine())
    assert again["answers"] == record["answers"] and again["answers"][0]["numbers"]
    assert not replay_notes(record, again) and not any(answer_differences(record, again))


def test_numbers_may_differ_in_their_last_digits_and_no_more() -> None:
    def numbers(*values: float) -> dict[str, Any]:
        return {"answers": [{"numbers": list(values)}]}

    assert answer_differences(numbers(1.0, -0.5), numbers(1.0002, -0.5001)) == [None]
    [found] = answer_differences(numbers(1.0, -0.5), numbers(1.0, -0.6))
    assert str(found) == "answer 0 differs from number 1 of 2 on:\n  captured: -0.5\n  now:      -0.6"


@pytest.mark.anyio
@pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
async def test_only_requests_that_ask_for_it_are_captured_where_that_is_set(path: str, tmp_path: Path) -> None:
    app = build_app(EncodingEngine(), settings(capture=tmp_path, capture_requests="asked"))  # type: ignore[arg-type]
    body = (BODIES | ENCODINGS)[path]
    await call(app, path=path, body=body)
    answer = await call(app, path=path, body=body, headers={"ingot-capture": "on"})
    await app.state.service.stop()
    assert [file.stem for file in tmp_path.glob("*.json")] == [answer.headers["x-request-id"]]


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize(("value", "hint"), [("on", "--capture"), ("yes", "'on'")])
async def test_what_cannot_be_captured_is_refused(path: str, value: str, hint: str) -> None:
    app = build_app(EncodingEngine(), settings())  # type: ignore[arg-type]
    made = await call(app, path=path, body=(BODIES | ENCODINGS)[path], headers={"ingot-capture": value})
    assert made.status == 400 and hint in made.json()["error"]["message"]


@pytest.mark.anyio
async def test_what_is_secret_in_a_body_is_not_written(tmp_path: Path) -> None:
    body = BODIES["/v1/chat/completions"] | {"metadata": {"Authorization": "Bearer hidden"}}
    record = await captured(tmp_path, "/v1/chat/completions", body)
    assert record["body"]["metadata"] == {"Authorization": "[removed]"}


@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_another_servers_answer_is_compared_by_its_text(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await captured(tmp_path, path, BODIES[path])
    [file] = tmp_path.glob("*.json")
    assert replay_at(file, hello) == 0
    assert "the same: 1 answer" in capsys.readouterr().out
    assert replay_at(file, lambda request: hello(request, ("Hello", ", ", "moon"))) == 1
    output = capsys.readouterr().out
    assert "answer 0 differs from character 7 of 12 on" in output
    assert "captured: 'world'" in output and "now:      'moon'" in output


@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_runs_again_here_token_for_token(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = scripted.start(lambda prompt: "Hello")
    try:
        raw = {"/v1/completions": {"prompt": f"{scripted.OPEN}user\nhi\n{scripted.ANSWER}"}}
        first = await captured(tmp_path, path, (BODIES | raw)[path], engine)
    finally:
        engine.close()
    assert len(first["answers"][0]["tokens"]) == 6
    [file] = tmp_path.glob("*.json")
    outcomes = [("Hello", 0, "the same: 1 answer, 6 tokens"), ("Help", 1, "differs from token 3 of 6 on")]
    for text, code, output in outcomes if path == "/v1/chat/completions" else outcomes[:1]:
        engine = scripted.start(lambda _, text=text: text)

        def loaded(loader: ModelLoader, engine: Engine = engine) -> list[tuple[ModelEntry, Engine]]:
            return [(with_name(loader._entries[0], engine.card.name), engine)]

        monkeypatch.setattr("ingot.cli.serve.load_resident_models", loaded)
        assert replay.run_replay([str(file)]) == code
        engine.close()
        assert output in capsys.readouterr().out


def replay_at(file: Path, script: Callable[[Request], Any]) -> int:
    with running(ScriptedEngine(script), settings()) as url:
        return replay.run_replay([str(file), "--url", url])


def record(*tokens: int, text: str = "") -> dict[str, Any]:
    model = {"name": "toy"}
    answers = [{"tokens": list(tokens), "text": text}]
    return {"fingerprint": "f", "model": model, "prompts": [{"tokens": 1, "digest": "d"}], "answers": answers}


def test_the_first_token_that_differs_is_named() -> None:
    [found] = answer_differences(record(1, 2, 3, text="abc"), record(1, 4, 3, text="axc"))
    assert str(found) == "answer 0 differs from token 1 of 3 on:\n  captured: 'bc'\n  now:      'xc'"
    [shorter] = answer_differences(record(1, 2, text="ab"), record(1, text="a"))
    assert shorter is not None and shorter.after == "(the end)"


def test_another_model_and_another_prompt_are_told() -> None:
    other = record(1) | {"fingerprint": "g", "prompts": []}
    assert [note.split(":")[0] for note in replay_notes(record(1), other)] == [
        "the model is different",
        "the prompt has different tokens",
    ]


def test_captured_settings_hold_where_none_are_given(tmp_path: Path) -> None:
    config = load_config({"max_sequences": 2}, {"XDG_CONFIG_HOME": str(tmp_path)})
    record = {"settings": {"max_sequences": 4, "kv_codec": "affine8", "alias": ["a=default"], "gone": 1}}
    made = with_captured_settings(config, record)
    assert (made.max_sequences, made.kv_codec, made.alias) == (2, "affine8", ("a=default",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a request"),
        ('{"version": 2, "body": {}}', "is not a request"),
        ('{"version": 1, "body": {}, "error": {"message": "too long"}}', "the request failed.*too long"),
    ],
)
def test_what_cannot_be_run_again_is_refused_in_words(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_capture(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_capture(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="leave out --url"):
        answer_texts("/v1/embeddings", {})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_what_a_policy_decided_is_decided_again(path: str) -> None:
    def fields(thinned: bool, policy: str = "auto", **asked: Any) -> Any:
        own = {"options": asked} if path.startswith("/api/") else asked
        record = {"path": path, "seed": 1, "body": {"messages": HI} | own, "answers": [], "thinned_out": thinned}
        body = replayed_body(record | {"settings": {"specprefill": policy}})
        return (body["options"] if path.startswith("/api/") else body).get("specprefill")

    assert (fields(True), fields(False)) == (True, False)
    assert fields(True, specprefill_keep_pct=0.2) is fields(True, "on") is fields(False, cache="exact") is None
    assert fields(False, specprefill=True) is True
