from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from ingot.errors import BadRequest, ModelNotFound
from ingot.protocol.ingot_api.tokenize import answer_detokenize, answer_tokenize
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.served import ServedModel
from tests import scripted
from tests.http.scripted import BOS, CARD, CONTEXT, ByteTokenizer, settings

TOY = ServedModel.of(CARD, ByteTokenizer(), settings())  # type: ignore[arg-type]
TALK = [{"role": "user", "content": "Hi"}]


def test_a_text_becomes_tokens() -> None:
    made = answer_tokenize({"prompt": "Hi"}, TOY)
    assert (made.tokens, made.count, made.max_model_len) == ([BOS, 72, 105], 3, CONTEXT)
    assert answer_tokenize({"prompt": "Hi", "add_special_tokens": False}, TOY).tokens == [72, 105]


def test_a_conversation_becomes_the_tokens_that_a_chat_would_use() -> None:
    text = bytes(answer_tokenize({"messages": TALK}, TOY).tokens).decode()
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    closed = answer_tokenize({"messages": TALK, "add_generation_prompt": False}, TOY)
    assert bytes(closed.tokens).decode().endswith("<|im_end|>\n")
    assert answer_tokenize({"messages": TALK, "add_special_tokens": True}, TOY).tokens[0] == BOS


def test_a_conversation_with_tools_becomes_the_tokens_that_a_chat_with_them_would_use() -> None:
    served = ServedModel.of(scripted.CARD, scripted.tokenizer(), settings(thinking="off"))
    shape = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": shape}}
    body = {"messages": TALK, "tools": [tool]}
    made = answer_tokenize(body, served)
    assert tuple(made.tokens) == read_chat(body, served, "one").request.prompts[0]
    assert made.ingot is UNSET, "nothing was ignored"
    assert made.count > answer_tokenize({"messages": TALK}, served).count
    with pytest.raises(BadRequest, match="tools go with messages"):
        answer_tokenize({"prompt": "Hi", "tools": [tool]}, served)


def test_tokens_become_text() -> None:
    assert answer_detokenize({"tokens": [BOS, 72, 105]}, TOY).prompt == "<bos>Hi"
    assert answer_detokenize({"tokens": [BOS, 72], "skip_special_tokens": True}, TOY).prompt == "H"
    assert answer_detokenize({"tokens": []}, TOY).prompt == ""


def test_unknown_fields_are_named() -> None:
    assert answer_tokenize({"prompt": "Hi", "quux": 1}, TOY).ingot.ignored == ["quux"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "Hi", "messages": TALK},
        {"prompt": "Hi", "add_generation_prompt": True},
        {"prompt": 3},
    ],
)
def test_what_makes_no_sense_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        answer_tokenize(body, TOY)


@pytest.mark.parametrize("tokens", [[300], [-1], ["a"], [True], None, "x"])
def test_only_the_models_own_tokens_have_a_text(tokens: Any) -> None:
    with pytest.raises(BadRequest):
        answer_detokenize({"tokens": tokens}, TOY)


def test_another_models_tokens_are_a_404() -> None:
    with pytest.raises(ModelNotFound):
        answer_tokenize({"prompt": "Hi", "model": "gpt-4"}, TOY)
