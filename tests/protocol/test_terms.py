"""Under which names a model is served: its own or given ones, `default`, and aliases that may be patterns."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from ingot.config import Settings, served_name
from ingot.errors import BadRequest, ConfigError, ModelNotFound
from ingot.protocol.anthropic.request import read_messages
from ingot.protocol.model_listings import retrieve_model
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.served import ServedModel
from ingot.protocol.terms import matches_model_name, model_names_schema, with_alias_names
from tests import scripted
from tests.http.scripted import settings

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def served(**changes: Any) -> ServedModel:
    return ServedModel.of(scripted.CARD, scripted.tokenizer(), settings(**changes))


@pytest.mark.parametrize(
    ("name", "names", "known"),
    [
        ("a", ("a", "b"), True),
        ("c", ("a", "b"), False),
        ("claude-opus-5", ("claude-*",), True),
        ("claude-", ("claude-*",), True),
        ("my-claude-opus-5", ("claude-*",), False),
        ("claude-*", ("claude-*",), True),
        ("gpt-4.1", ("gpt-4.*",), True),
        ("gpt-4o1", ("gpt-4.*",), False),
        ("org/model(1)", ("org/*(1)",), True),
        ("anything\nat all", ("*",), False),
    ],
)
def test_a_name_is_one_of_the_names_or_matches_a_pattern(name: str, names: tuple[str, ...], known: bool) -> None:
    assert matches_model_name(name, names) is known
    assert jsonschema_rs.is_valid(model_names_schema(names), name) is known


def test_an_alias_counts_where_its_target_is_a_name() -> None:
    aliases = ("claude-*=default", "text-*=encoder")
    assert with_alias_names(("model", "default"), aliases) == ("model", "default", "claude-*")
    assert with_alias_names(("encoder", "default"), aliases) == ("encoder", "default", "claude-*", "text-*")


@pytest.mark.parametrize("name", ["scripted", "default", "claude-opus-5", "mine"])
def test_every_protocol_takes_every_name(name: str) -> None:
    here = served(alias=("claude-*=default", "mine=scripted"))
    read_chat({**BODY, "model": name}, here, "chatcmpl-1")
    read_messages({**BODY, "model": name}, here, "msg_1")
    assert retrieve_model(name, here, []).id == "scripted"


def test_a_name_that_nobody_has_is_a_404_that_lists_what_is_served() -> None:
    here = served(alias=("claude-*=default",))
    with pytest.raises(ModelNotFound, match=r"Served: 'scripted', 'default', 'claude-\*'"):
        read_messages({**BODY, "model": "gpt-4o"}, here, "msg_1")
    with pytest.raises(ModelNotFound, match=r"claude-\*"):
        retrieve_model("gpt-4o", here, here.terms.models)


def test_a_model_may_have_several_names() -> None:
    here = served(served_model_name=("one", "two"))
    for name in ("one", "two", "default"):
        read_chat({**BODY, "model": name}, here, "chatcmpl-1")


def test_answers_carry_the_first_of_the_given_names() -> None:
    assert served_name(settings(served_model_name=("one", "two")), "own") == "one"
    assert served_name(settings(), "own") == "own"


def test_a_name_must_be_a_string() -> None:
    with pytest.raises(BadRequest):
        read_chat({**BODY, "model": 3}, served(), "chatcmpl-1")


@pytest.mark.parametrize(
    ("values", "result"),
    [
        ({"alias": ("claude-*",)}, "claude-*=default"),
        ({"alias": ("=default",)}, "is not an alias"),
        ({"served_model_name": ("claude-*",)}, "--alias"),
    ],
)
def test_what_is_no_name_is_refused(values: dict[str, Any], result: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Settings(**values)
    assert result in raised.value.message
