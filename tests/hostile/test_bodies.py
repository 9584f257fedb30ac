"""Bodies made to hurt: each is refused with a 4xx in the shape of an error, and the engine never hears of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ingot.protocol.openai.chat import ChatBody
from ingot.protocol.openai.completions import CompletionBody
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, settings

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
ROUTES = {"/v1/chat/completions": (CHAT, ChatBody), "/v1/completions": (TEXT, CompletionBody)}
LONG = "x" * 100_000
WRONG: list[Any] = [{}, {"a": {"b": [{}]}}, [[[]]], [None], "\x00", LONG, -(10**30), 10**30, 1e308, [{}] * 3]
# What a field may hold although it looks odd.
WISHES = ("mm_processor_kwargs", "media_io_kwargs")  # about what nobody sends
OBJECTS = ("logit_bias", "metadata", "chat_template_kwargs", "stream_options", "reasoning", *WISHES)
FINE = {(name, "{}") for name in OBJECTS}
# an unknown field, which the receipt names
FINE |= {(name, '{"a": {"b": [{}]}}') for name in ("stream_options", "reasoning", *WISHES)}
ANY_TEXT = ("user", "stop", "safety_identifier", "prompt_cache_key", "cache_salt", "prompt")
FINE |= {(name, '"\\u0000"') for name in ANY_TEXT}


async def refused(body: Any, path: str = "/v1/chat/completions", **changes: Any) -> Call:
    engine = ScriptedEngine()
    made = await call(build_app(engine, settings(**changes)), path=path, body=body)  # type: ignore[arg-type]
    assert 400 <= made.status < 500, made.body[:300]
    assert set(made.json()["error"]) == {"message", "type", "param", "code"}
    assert len(made.body) < 4096
    assert engine.requests == []
    return made


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"messages": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [], "temperature": Infinity}',
        b'{"messages": [], "temperature": 1e400}',
        b'{"messages": [], "seed": 1' + b"0" * 10_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 65 + b"]" * 65,
        b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}",
        b"{}" * 1000,
        b'{"messages": [] /* comment */}',
        b"{'messages': []}",
        b'{"messages": [],}',
    ],
    ids=lambda raw: repr(raw[:40]),
)
async def test_what_is_no_json_or_too_deep_is_a_400(raw: bytes) -> None:
    assert (await refused(raw)).status == 400


@pytest.mark.parametrize("path", ROUTES)
async def test_no_field_takes_a_value_of_a_wrong_type(path: str) -> None:
    base, body = ROUTES[path]
    engine = ScriptedEngine()
    app = build_app(engine, settings())  # type: ignore[arg-type]
    for field in dataclasses.fields(body):
        for value in WRONG:
            made = await call(app, path=path, body=base | {field.name: value})
            if (field.name, json.dumps(value)) not in FINE:
                assert made.status in (400, 404), (field.name, value, made.body)
                assert made.json()["error"]["param"].split(".")[0] == field.name
            else:
                assert made.status == 200, made.body


@pytest.mark.parametrize(
    "body",
    [
        {"n": 10**9},
        {"n": 128.5},
        {"max_tokens": 2**63},
        {"max_tokens": 1e18},
        {"top_logprobs": 10**6, "logprobs": True},
        {"temperature": -0.0001},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1_0": 1}},
        {"logit_bias": {"١": 1}},
        {"stop": ["x"] * 100_000},
        {"stop": "x" * 100_000},
        {"stop_token_ids": [1] * 100_000},
        {"timeout": 1e9},
        {"timeout": 0},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"__class__": "x"}},
        {"metadata": {"k" * 100_000: "v"}},
        {"messages": [{"role": "user", "content": "x"}] * 70_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5000}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
    ],
    ids=lambda body: json.dumps(body)[:40],
)
async def test_every_number_and_every_list_is_bounded(body: dict[str, Any]) -> None:
    await refused(CHAT | body)


async def test_many_unknown_fields_cost_little() -> None:
    made = await refused(CHAT | {f"unknown_{at}_{at * 7919}": 1 for at in range(100_000)})
    assert "unknown fields" in made.json()["error"]["message"]
    messages = [{"role": "user", "content": "x", f"unknown_{at}": 1} for at in range(10_000)]
    await refused({"messages": messages})


async def test_a_refusal_repeats_no_more_than_a_little_of_what_was_sent() -> None:
    for body in (
        {"model": "m" * 100_000},
        {"k" * 100_000 + "messages": 1, "top_p": "x" * 100_000},
        {"service_tier": "x" * 10**5},
    ):
        assert len((await refused(CHAT | body)).body) < 1024


async def test_sequences_of_one_request_are_bounded() -> None:
    await refused({"prompt": ["x"] * 256, "n": 128}, path="/v1/completions")
    await refused({"prompt": [[1]] * 256, "best_of": 128}, path="/v1/completions")


async def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    engine = ScriptedEngine()
    raw = b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 9, "temperature": 0.5}'
    made = await call(build_app(engine, settings()), body=raw)  # type: ignore[arg-type]
    assert (made.status, engine.requests[0].sampling.temperature) == (200, 0.5)


async def test_a_token_that_looks_like_an_integer_is_one() -> None:
    engine = ScriptedEngine()
    body = {"prompt": [1.0, 2], "max_tokens": 3.0}
    made = await call(build_app(engine, settings()), path="/v1/completions", body=body)  # type: ignore[arg-type]
    assert (made.status, engine.requests[0].prompts, engine.requests[0].max_tokens) == (200, ((1, 2),), 3)
