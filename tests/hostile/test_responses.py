"""Responses made to hurt: what is wrong is refused by its name, and the engine never hears of it."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from typing import Any

import pytest

from ingot.protocol.responses.request import ResponsesBody
from tests.hostile.test_bodies import WRONG, refused
from tests.http.asgi import call
from tests.http.scripted import ScriptedEngine, build_app, settings

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
# What a field may hold although it looks odd.
OBJECTS = ("logit_bias", "metadata", "chat_template_kwargs", "stream_options", "reasoning", "text", "client_metadata")
UNKNOWN = ("stream_options", "reasoning", "text", "client_metadata")  # an unknown field, which the receipt names
TEXTS = ("input", "instructions", "user", "stop", "safety_identifier", "prompt_cache_key", "cache_salt")
FINE = {(name, "{}") for name in OBJECTS} | {(name, '{"a": {"b": [{}]}}') for name in UNKNOWN}
FINE |= {(name, '"\\u0000"') for name in TEXTS}


async def test_no_field_takes_a_value_of_a_wrong_type() -> None:
    app = build_app(ScriptedEngine(), settings())  # type: ignore[arg-type]
    for field in dataclasses.fields(ResponsesBody):
        for value in WRONG:
            made = await call(app, path=PATH, body={"input": "Hi", field.name: value})
            if (field.name, json.dumps(value)) in FINE:
                assert made.status == 200, (field.name, value, made.body)
                continue
            assert made.status in (400, 404), (field.name, value, made.body)
            # Long instructions are part of a prompt that is too long, which is the input's.
            named = made.json()["error"]["param"].split(".")[0]
            assert named == field.name or (field.name, named) == ("instructions", "input")


def sealed(content: bytes) -> list[dict[str, Any]]:
    text = "ingot1." + base64.urlsafe_b64encode(bytes(24) + content).decode()
    return [{"type": "reasoning", "summary": [], "encrypted_content": text}]


@pytest.mark.parametrize(
    "body",
    [
        {"input": sealed(zlib.compress(bytes(50_000_000)))},
        {"input": sealed(b"\x80")},
        {"input": [{"role": "user", "content": "x"}] * 70_000},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 5000}]},
        {"input": [{"type": "item_reference", "id": "msg_" + "0" * 24 + "_0"}]},
        {"input": [{"type": "item_reference", "id": "x" * 1000}]},
        {"input": "Hi", "previous_response_id": "resp_' OR 1=1 --"},
        {"input": "Hi", "tools": [{"type": "function", "name": "x", "parameters": {}}] * 1025},
        {"input": "Hi", "tools": [{"type": "function", "name": "x" * 1000, "parameters": {}}]},
        {"input": "Hi", "tools": [{"type": "function", "name": "a b", "parameters": {}}]},
        {"input": "Hi", "tools": [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "js"}}]},
        {"input": "Hi", "tools": [{"type": "mcp", "server_label": "x", "server_url": "http://169.254.169.254/"}]},
        {"input": "Hi", "metadata": {"k": "v" * 1000}},
        {"input": "Hi", "max_tool_calls": 10**9},
        {"input": "Hi", "include": ["message.output_text.logprobs"] * 100},
    ],
    ids=lambda body: json.dumps(body)[:60],
)
async def test_what_is_too_much_or_somebody_elses_is_refused(body: dict[str, Any]) -> None:
    await refused(body, path=PATH)
