"""Every protocol takes every field that says how a request is served, and the engine is asked for the same.

A field that is added to the engine's `Request`, `Sampling` or `Stop` has to be named here, and then has to arrive from
every protocol.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ingot.protocol
from ingot.engine.request import LoraRef, Request, Sampling, SpecPrefillRequest, Stop
from ingot.protocol.anthropic.request import MESSAGES_BODY, read_messages
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.ollama.request import OLLAMA_CHAT_BODY, OLLAMA_GENERATE_BODY, read_ollama_chat, read_ollama_generate
from ingot.protocol.openai.chat import CHAT_BODY, read_chat
from ingot.protocol.openai.completions import COMPLETION_BODY, read_completion
from ingot.protocol.responses.request import RESPONSES_BODY, ResponseContext, read_response
from ingot.protocol.schema.objects import ObjectOf
from ingot.protocol.served import ServedModel
from tests import scripted
from tests.http.scripted import settings

LORA = LoraRef("fine", "digest")
ANSWERED: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go on."},
    ]
}
Read = Callable[[Any, ServedModel, str], Any]


def response(value: Any, served: ServedModel, id: str) -> GenerationTask:
    return read_response(value, served, id, ResponseContext(None, {})).first


@dataclass(frozen=True)
class Wire:
    """An address: what its least body is, what reads it, and where in it our fields stand."""

    read: Read
    schema: ObjectOf
    least: dict[str, Any]
    names: dict[str, str] | None = None  # what it calls fields that others call otherwise
    within: str | None = None

    def body(self, field: str, value: Any) -> dict[str, Any]:
        message = {(self.names or {}).get(field, field): value}
        inside = self.within is not None and field != "adapter"
        return self.least | ({self.within: message} if inside else message)

    def request(self, body: dict[str, Any]) -> Request:
        job = self.read(body, served(), "one")
        assert isinstance(job, GenerationTask) and job.head is not None and job.head.ignored == []
        return job.request

    def documented(self, field: str) -> bool:
        known = self.schema.schema(served().terms)
        known = known if self.within is None or field == "adapter" else nested(known, self.within)
        return (self.names or {}).get(field, field) in known["properties"]


OLLAMA = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
WIRES = {
    "chat": Wire(read_chat, CHAT_BODY, ANSWERED),
    "completions": Wire(read_completion, COMPLETION_BODY, {"prompt": "Hi"}),
    "responses": Wire(response, RESPONSES_BODY, {"input": "Hi"}, {"max_tokens": "max_output_tokens"}),
    "messages": Wire(read_messages, MESSAGES_BODY, ANSWERED | {"max_tokens": 9}, {"stop": "stop_sequences"}),
    "ollama chat": Wire(read_ollama_chat, OLLAMA_CHAT_BODY, ANSWERED, OLLAMA, within="options"),
    "ollama generate": Wire(read_ollama_generate, OLLAMA_GENERATE_BODY, {"prompt": "Hi"}, OLLAMA, within="options"),
}


@dataclass(frozen=True)
class Shared:
    """A field of a body, and what the engine is to find of it."""

    field: str
    value: Any
    found: Any


SAMPLING = {
    "temperature": Shared("temperature", 0.3, 0.3),
    "top_p": Shared("top_p", 0.4, 0.4),
    "top_k": Shared("top_k", 7, 7),
    "min_p": Shared("min_p", 0.1, 0.1),
    "presence_penalty": Shared("presence_penalty", 0.5, 0.5),
    "frequency_penalty": Shared("frequency_penalty", 0.6, 0.6),
    "repetition_penalty": Shared("repetition_penalty", 1.2, 1.2),
    "logit_bias": Shared("logit_bias", {"5": -3.0}, ((5, -3.0),)),
    "seed": Shared("seed", 11, 11),
}
STOP = {
    "strings": Shared("stop", ["END"], ("END",)),
    "token_ids": Shared("stop_token_ids", [5], frozenset({5})),
    "ignore_eos": Shared("ignore_eos", True, True),
    "min_tokens": Shared("min_tokens", 3, 3),
    "loop_guard": Shared("loop_guard", False, False),
    "keep": Shared("include_stop_str_in_output", True, True),
}
REQUEST = {
    "max_tokens": Shared("max_tokens", 5, 5),
    "cache": Shared("cache", "off", False),
    "exact": Shared("cache", "exact", True),
    "salt": Shared("cache_salt", "mine", "mine"),
    "priority": Shared("priority", 4, -4),
    "lora": Shared("adapter", "fine", LORA),
    "speculate": Shared("speculate", "lookup", ("lookup",)),
}
# What is said of these is no single value.
TRIED_APART = {"sampling", "stop", "specprefill", "deadline"}
# What follows from the prompt, from how a protocol tells an answer, or from who asks.
OF_ITS_OWN = {
    *("id", "prompts", "n", "reading", "grammar", "marks", "media", "logprobs", "prompt_logprobs"),
    *("tenant", "via", "arrived", "pin", "background"),
}


@cache
def served() -> ServedModel:
    made = ServedModel.of(scripted.CARD, scripted.tokenizer(), settings())
    return replace(made, terms=replace(made.terms, proposers=("lookup",), loras={"fine": LORA}))


def nested(schema: dict[str, Any], field: str) -> dict[str, Any]:
    inner = schema["properties"][field]
    return inner if "properties" in inner else next(kind for kind in inner["anyOf"] if "properties" in kind)


def found(request: Request, name: str) -> Any:
    for noun in (request, request.sampling, request.stop):
        if name in {field.name for field in fields(noun)}:
            return getattr(noun, name)
    raise AssertionError(f"the engine has no {name}")


def test_every_field_of_a_request_is_known_here() -> None:
    known = {*SAMPLING, *STOP, *REQUEST, *TRIED_APART, *OF_ITS_OWN}
    assert {field.name for noun in (Request, Sampling, Stop) for field in fields(noun)} == known


@pytest.mark.parametrize("name", [*SAMPLING, *STOP, *REQUEST])
@pytest.mark.parametrize("wire", WIRES)
def test_a_field_that_one_protocol_takes_all_of_them_take_and_document(wire: str, name: str) -> None:
    shared, result = (SAMPLING | STOP | REQUEST)[name], WIRES[wire]
    assert found(result.request(result.least), name) != shared.found
    assert found(result.request(result.body(shared.field, shared.value)), name) == shared.found
    assert result.documented(shared.field)


@pytest.mark.parametrize("wire", WIRES)
def test_a_prompt_may_be_thinned_in_every_protocol(wire: str) -> None:
    result = WIRES[wire]
    assert result.request(result.least).specprefill is None
    query = result.request(result.body("specprefill", True)).specprefill
    assert isinstance(query, SpecPrefillRequest) and query.forced
    share = result.request(result.body("specprefill_keep_pct", 0.25)).specprefill
    assert isinstance(share, SpecPrefillRequest) and share.keep == 0.25


@pytest.mark.parametrize("wire", WIRES)
def test_a_request_may_say_how_long_it_may_take_in_every_protocol(wire: str) -> None:
    result, before = WIRES[wire], time.monotonic()
    limits = [result.request(body).deadline for body in (result.body("timeout", 7.0), result.least)]
    after = time.monotonic()
    assert limits[0] is not None and before + 7.0 <= limits[0] <= after + 7.0
    assert limits[1] is not None and limits[1] >= before + served().terms.timeout_s > after + 7.0


@pytest.mark.parametrize(
    "wire", [name for name, result in WIRES.items() if result.least.keys() & {"messages", "input"}]
)
def test_past_answers_are_looked_for_under_the_requests_own_salt(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, query = WIRES[wire], []

    def rendered(*_: Any, salt: str, remembers: bool, **__: Any) -> Any:
        query.append((salt, remembers))
        raise InterruptedError

    monkeypatch.setattr("ingot.protocol.chat.preparation.render_messages", rendered)
    for body in (result.least, result.body("cache_salt", "mine"), result.body("cache", "off")):
        with pytest.raises(InterruptedError):
            result.request(body)
    assert query == [("", True), ("mine", True), ("", False)]


def test_requests_are_made_in_one_place() -> None:
    """Beside it only prompts that are computed before anybody asks, which no client sends."""
    assert set(makers()) == {"protocol/chat/generation_fields.py", "http/service.py"}


def makers() -> Iterator[str]:
    folder = Path(ingot.protocol.__file__).parents[1]
    for file in (*(folder / "protocol").rglob("*.py"), *(folder / "http").rglob("*.py")):
        tree = ast.parse(file.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if "from ingot.engine.request import" in file.read_text() and any(
            isinstance(call.func, ast.Name) and call.func.id == "Request" for call in calls
        ):
            yield str(file.relative_to(folder))
