"""What `/v1/models` says of the served model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ingot.engine.status import ModelStatus
from ingot.protocol.model_listings import list_models, retrieve_model
from ingot.protocol.served import ServedModel
from tests import scripted
from tests.http.scripted import ByteTokenizer, settings

STANDS = ModelStatus("scripted", "loaded", resident=True)


def served(**changes: Any) -> ServedModel:
    return ServedModel.of(scripted.CARD, scripted.tokenizer(), settings(**changes))


def told(served: ServedModel) -> tuple[Any, ...]:
    body = msgspec.to_builtins(list_models([(STANDS, served)]).data[0])
    assert msgspec.to_builtins(retrieve_model("default", served, [])) == body
    return body["tool_format"], body["thinking_format"], body["format_source"]


def test_the_formats_and_what_told_them_are_listed() -> None:
    assert told(served(tool_format="glm", thinking_format="none")) == ("glm", None, "setting")
    assert told(served(tool_format="glm", thinking_format="mistral")) == ("glm", "mistral", "setting")


def test_a_format_that_nothing_told_is_called_a_guess() -> None:
    for family, expected in (("unheard_of", ("hermes", "guess")), ("gpt_oss", ("harmony", "model_type"))):
        card = replace(scripted.CARD, family=family)
        plain = ServedModel.of(card, ByteTokenizer(None), settings())  # type: ignore[arg-type]
        assert told(plain)[::2] == expected


def test_a_template_tells_whatever_the_type() -> None:
    assert told(served())[2] == "template"


def test_a_model_without_a_chat_template_says_that_it_does_not_chat() -> None:
    assert msgspec.to_builtins(list_models([(STANDS, served())]).data[0])["chats"] is True
    base = ServedModel.of(scripted.CARD, ByteTokenizer(None), settings())  # type: ignore[arg-type]
    assert msgspec.to_builtins(list_models([(STANDS, base)]).data[0])["chats"] is False
