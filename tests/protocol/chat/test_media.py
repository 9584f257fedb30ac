"""Pictures and the like, sent to a model that reads text alone: told in words where they are past, else refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ingot.errors import BadRequest, Unsupported
from ingot.protocol.anthropic.request import read_messages
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.ollama.request import read_ollama_chat
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.responses.request import ResponseContext, read_response
from ingot.protocol.served import ServedModel
from tests.http.scripted import CARD, ByteTokenizer, settings

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
PLACE = "[image left out: this model reads text alone]"


def served(*, strict: bool = False) -> ServedModel:
    tokenizer: Any = ByteTokenizer()
    return ServedModel.of(CARD, tokenizer, settings(strict=strict))


Turns = list[dict[str, Any]]


@dataclass(frozen=True)
class Protocol:
    shown: dict[str, Any]  # the user shows a picture
    given: Turns  # a tool is called, and gives one back
    named: str  # which the receipt calls that
    read: Callable[..., GenerationTask]


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def read_chat_turns(turns: Turns, strict: bool = False) -> GenerationTask:
    return read_chat({"messages": turns}, served(strict=strict), "chatcmpl-1")


def read_message_turns(turns: Turns, strict: bool = False) -> GenerationTask:
    return read_messages({"messages": turns, "max_tokens": 9}, served(strict=strict), "msg_1")


def read_items(turns: Turns, strict: bool = False) -> GenerationTask:
    around = ResponseContext(None, {})
    return read_response({"input": turns}, served(strict=strict), "resp_" + "0" * 24, around).first


def read_ollama_turns(turns: Turns, strict: bool = False) -> GenerationTask:
    job = read_ollama_chat({"messages": turns}, served(strict=strict), "req-1")
    assert isinstance(job, GenerationTask)
    return job


URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CALL = {"id": "c1", "type": "function", "function": {"name": "see", "arguments": "{}"}}
CHAT = Protocol(
    {"role": "user", "content": [text("Look:"), URL]},
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("Seen:"), URL]},
    ],
    "messages.*.content.*.image_url",
    read_chat_turns,
)
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [text("Seen:"), BLOCK]}
MESSAGES = Protocol(
    {"role": "user", "content": [text("Look:"), BLOCK]},
    [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "see", "input": {}}]},
        {"role": "user", "content": [RESULT]},
    ],
    "messages.*.content.*.content.*.image",
    read_message_turns,
)
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
RESPONSES = Protocol(
    {"role": "user", "content": [text("Look:", "input_text"), INPUT]},
    [
        {"type": "function_call", "call_id": "c1", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [text("Seen:", "input_text"), INPUT]},
    ],
    "input.*.output.*.input_image",
    read_items,
)
OLLAMA = Protocol(
    {"role": "user", "content": "Look:", "images": ["AA=="]},
    [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "see", "arguments": {}}}]},
        {"role": "tool", "tool_name": "see", "content": "Seen:", "images": ["AA=="]},
    ],
    "messages.*.images",
    read_ollama_turns,
)
PROTOCOLS = pytest.mark.parametrize(
    "protocol", [CHAT, MESSAGES, RESPONSES, OLLAMA], ids=["chat", "messages", "responses", "ollama"]
)


def prompt(job: GenerationTask) -> str:
    return bytes(job.request.prompts[0]).decode()


def ignored(job: GenerationTask) -> list[str]:
    assert job.head is not None
    return job.head.ignored


@PROTOCOLS
def test_an_image_that_a_tool_gave_back_is_told_in_words_and_named(protocol: Protocol) -> None:
    for turns in ([USER, *protocol.given], [USER, *protocol.given, ANSWER, USER]):
        job = protocol.read(turns)
        assert f"Seen:\n{PLACE}" in prompt(job)
        assert ignored(job) == [protocol.named]


@PROTOCOLS
def test_an_image_in_a_question_is_refused(protocol: Protocol) -> None:
    for turns in ([protocol.shown], [USER, ANSWER, protocol.shown], [USER, ANSWER, protocol.shown, USER]):
        with pytest.raises(Unsupported, match="run on text alone"):
            protocol.read(turns)


@PROTOCOLS
def test_an_image_in_a_question_that_was_answered_is_told_in_words_and_named(protocol: Protocol) -> None:
    for turns in ([protocol.shown, ANSWER, USER], [protocol.shown, *protocol.given]):
        job = protocol.read(turns)
        assert f"Look:\n{PLACE}" in prompt(job)
        assert ignored(job)


@PROTOCOLS
def test_a_strict_server_refuses_what_the_model_would_not_see(protocol: Protocol) -> None:
    with pytest.raises(Unsupported, match="strict"):
        protocol.read([USER, *protocol.given], strict=True)


@pytest.mark.parametrize("protocol", [CHAT, MESSAGES])
def test_an_answer_that_is_to_be_continued_does_not_make_its_question_past(protocol: Protocol) -> None:
    with pytest.raises(Unsupported, match="run on text alone"):
        protocol.read([protocol.shown, ANSWER])


def test_a_document_that_is_no_text_is_told_likewise() -> None:
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [pdf]}
    job = MESSAGES.read([USER, MESSAGES.given[0], {"role": "user", "content": [result]}])
    assert "[document left out: this model reads text alone]" in prompt(job)
    with pytest.raises(Unsupported, match=r"document.*run on text alone"):
        MESSAGES.read([{"role": "user", "content": [pdf]}])


@pytest.mark.parametrize("read", [read_chat_turns, read_items])
@pytest.mark.parametrize("wrong", [7, [7], [None], [[]]])
def test_what_is_no_list_of_messages_is_still_refused(read: Callable[[Any], GenerationTask], wrong: Any) -> None:
    with pytest.raises(BadRequest):
        read(wrong)
