"""Named keys: their limits, their rotation while the server runs, and what the audit log says of refusals."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from ingot.config import ApiKey, read_keys
from ingot.errors import ConfigError, RateLimited
from ingot.http.tenants import RATE_HEADERS, RateLimits
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, settings

pytestmark = pytest.mark.anyio

HI = {"messages": [{"role": "user", "content": "hi"}]}


def key_file(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    # Written twice within a clock's tick, a file of the same length would look the same.
    os.utime(path, ns=(0, crc32(text.encode())))
    return path


async def ask(app: Any, key: str) -> Call:
    return await call(app, body=HI, headers={"x-api-key": key})


def served(path: Path, engine: ScriptedEngine | None = None) -> Any:
    return build_app(engine or ScriptedEngine(), settings(api_key_file=path))  # type: ignore[arg-type]


def test_a_file_names_keys_with_what_they_may(tmp_path: Path) -> None:
    path = key_file(
        tmp_path,
        '[alice]\nkey = "alices-key"\nrequests_per_minute = 2\ntokens_per_minute = 100\n'
        'models = ["qwen*"]\npriority = 1\n'
        '[bob]\nkeys = ["bobs-new-key", "bobs-old-key"]\n',
    )
    assert read_keys(path) == (
        ApiKey(("alices-key",), "alice", 2, 100, ("qwen*",), 1),
        ApiKey(("bobs-new-key", "bobs-old-key"), "bob"),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[alice]\n", "neither key nor keys"),
        ('[alice]\nkey = "short"\n', "at least 8 characters"),
        ('[alice]\nkey = "the-same-key"\n[bob]\nkey = "the-same-key"\n', r"\[alice\] has the same key"),
        ('[alice]\nkey = "long-enough"\nrequest_per_minute = 3\n', "unknown field `request_per_minute`"),
        ('[alice]\nkey = "long-enough"\nrequests_per_minute = 0\n', ">= 1"),
        ('["a b"]\nkey = "long-enough"\n', "a name has"),
        ("[0123456789abcdef]\nkey = 'long-enough'\n", "a name has"),
        ("[alice\n", "not valid TOML"),
        ("", "contains no key"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_words_without_keys(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        read_keys(key_file(tmp_path, text))
    assert "long-enough" not in raised.value.message and "the-same-key" not in raised.value.message


async def test_a_key_is_refused_beyond_its_requests_a_minute(tmp_path: Path) -> None:
    app = served(
        key_file(tmp_path, '[alice]\nkey = "alices-key"\nrequests_per_minute = 2\n[bob]\nkey = "bobs-key-1"\n')
    )
    first, second, third = [await ask(app, "alices-key") for _ in range(3)]
    assert (first.status, second.status, third.status) == (200, 200, 429)
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert {name for name in first.headers if name.startswith("x-ratelimit-")} <= set(RATE_HEADERS)
    assert third.json()["error"]["code"] == "rate_limit_exceeded" and 1 <= int(third.headers["retry-after"]) <= 30
    assert (await ask(app, "bobs-key-1")).status == 200
    models = await call(app, "GET", "/v1/models", headers={"x-api-key": "alices-key"})
    assert models.status == 200  # which takes no engine


async def test_tokens_of_prompts_and_answers_count_and_may_be_owed(tmp_path: Path) -> None:
    app = served(key_file(tmp_path, '[alice]\nkey = "alices-key"\ntokens_per_minute = 10\n'))
    first = await ask(app, "alices-key")
    assert first.status == 200 and first.json()["usage"]["total_tokens"] > 10
    assert (await ask(app, "alices-key")).status == 429


def test_what_was_used_flows_back_within_a_minute() -> None:
    now = 0.0
    rates, key = RateLimits(lambda: now), ApiKey((), requests_per_minute=2, tokens_per_minute=60)
    for _ in range(2):
        rates.admit("alice", key)
    with pytest.raises(RateLimited) as refused:
        rates.admit("alice", key)
    assert refused.value.retry_after == 30
    now = 30.0
    rates.admit("alice", key)
    rates.charge("alice", key, 120)
    now = 60.0
    with pytest.raises(RateLimited, match="Rate limit: 60 tokens per minute") as refused:
        rates.admit("alice", key)
    assert refused.value.retry_after == pytest.approx(31)
    now = 92.0
    rates.admit("alice", key)


async def test_a_key_is_for_the_models_that_it_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = served(
        key_file(
            tmp_path, '[alice]\nkey = "alices-key"\nmodels = ["org/*"]\n[bob]\nkey = "bobs-key-1"\nmodels = ["b"]\n'
        )
    )
    assert (await ask(app, "alices-key")).status == 200
    refused = await ask(app, "bobs-key-1")
    assert refused.status == 403 and "not for org/toy" in refused.json()["error"]["message"]
    assert "key bob" in caplog.text


async def test_a_keys_name_is_its_tenant_and_its_priority_goes_to_the_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    app = served(key_file(tmp_path, '[alice]\nkeys = ["alices-key", "alices-next"]\npriority = 3\n'), engine)
    await ask(app, "alices-key")
    await ask(app, "alices-next")
    assert [(request.tenant, request.priority) for request in engine.requests] == [("alice", 3)] * 2


HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "within"),
    [
        ("/v1/chat/completions", HI, None),
        ("/v1/completions", {"prompt": "hi"}, None),
        ("/v1/responses", {"input": "hi"}, None),
        ("/v1/messages", HI | {"max_tokens": 9}, None),
        ("/api/chat", HI, "options"),
        ("/api/generate", {"prompt": "hi"}, "options"),
    ],
)
async def test_a_request_may_stand_back_and_the_administrators_may_go_first(
    path: str, body: dict[str, Any], within: str | None, tmp_path: Path
) -> None:
    engine = ScriptedEngine()
    keys = key_file(tmp_path, '[alice]\nkey = "alices-key"\npriority = 3\n')
    app = build_app(engine, settings(api_key_file=keys, admin_api_key="the-admins-key"))  # type: ignore[arg-type]

    async def query(key: str, priority: int) -> int:
        headers = {"authorization": f"Bearer {key}"}
        result = {"priority": priority} if within is None else {within: {"priority": priority}}
        return (await call(app, path=path, body=body | result, headers=headers)).status

    assert [await query("alices-key", priority) for priority in (0, 4, -1, 11)] == [200, 200, 403, 400]
    assert await query("the-admins-key", -2) == 200
    assert [request.priority for request in engine.requests] == [3, -1, 2]


async def test_keys_change_while_the_server_runs(tmp_path: Path) -> None:
    app = served(key_file(tmp_path, '[alice]\nkey = "alices-key"\n'))
    assert [(await ask(app, key)).status for key in ("alices-key", "alices-next")] == [200, 401]
    key_file(tmp_path, '[alice]\nkeys = ["alices-next"]\n')
    assert [(await ask(app, key)).status for key in ("alices-key", "alices-next")] == [401, 200]


@pytest.mark.parametrize("text", ["[alice]\n", None])
async def test_a_file_that_went_wrong_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    path = key_file(tmp_path, '[alice]\nkey = "alices-key"\n')
    app = served(path)
    if text is None:
        path.unlink()
    else:
        key_file(tmp_path, text)
    assert [(await ask(app, "alices-key")).status for _ in range(2)] == [200, 200]
    assert caplog.text.count("the keys stay as they were") == 1


async def test_each_refusal_is_a_line_that_holds_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ingot.audit")
    app = served(key_file(tmp_path, '[alice]\nkey = "alices-key"\nrequests_per_minute = 1\n'))
    unknown = await ask(app, "a-stolen-key")
    await ask(app, "alices-key")
    limited = await ask(app, "alices-key")
    without = await call(app, body=HI)
    foreign = await call(app, body=HI, headers={"host": "evil.example", "x-api-key": "alices-key"})
    lines = [record.getMessage() for record in caplog.records if record.name == "ingot.audit"]
    assert [line.split()[0] for line in lines] == [
        made.headers["x-request-id"] for made in (unknown, limited, without, foreign)
    ]
    assert "refused, 401 invalid_api_key: POST '/v1/chat/completions' from 127.0.0.1, key unknown, " in lines[0]
    assert lines[1].endswith("key alice") and "429 rate_limit_exceeded" in lines[1]
    assert lines[2].endswith("key none")
    assert lines[3].endswith("key alice") and "403" in lines[3]
    assert "stolen" not in caplog.text and "alices-key" not in caplog.text
