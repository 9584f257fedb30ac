"""How tokens are chosen where a request does not say, through every protocol."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ingot.config import load_config
from ingot.engine.request import Sampling
from ingot.engine.status import ModelStatus
from ingot.errors import ConfigError
from ingot.protocol.anthropic.request import read_messages
from ingot.protocol.chat.sampling_defaults import sampling_defaults
from ingot.protocol.model_listings import list_models, retrieve_model, show_ollama_model
from ingot.protocol.ollama.request import read_ollama_chat, read_ollama_generate
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.openai.completions import read_completion
from ingot.protocol.responses.request import ResponseContext, read_response
from ingot.protocol.served import ServedModel
from tests.http.scripted import CARD, ByteTokenizer, settings

STANDS = ModelStatus("scripted", "loaded", resident=True)
USER = {"role": "user", "content": "Hi"}
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}


def served(recommended: dict[str, Any] | None = None, **changes: Any) -> ServedModel:
    tokenizer: Any = ByteTokenizer()
    return ServedModel.of(replace(CARD, recommended=recommended or {}), tokenizer, settings(**changes))


def chat(to: ServedModel, **result: Any) -> Sampling:
    return read_chat({"messages": [USER], **result}, to, "chatcmpl-1").request.sampling


def completion(to: ServedModel, **result: Any) -> Sampling:
    return read_completion({"prompt": "Hi", **result}, to, "cmpl-1").request.sampling


def messages(to: ServedModel, **result: Any) -> Sampling:
    return read_messages({"messages": [USER], "max_tokens": 9, **result}, to, "msg_1").request.sampling


def response(to: ServedModel, **result: Any) -> Sampling:
    plan = read_response({"input": "Hi", **result}, to, "resp_" + "0" * 24, ResponseContext(None, {}))
    body = plan.builder.snapshot()
    sampling = plan.first.request.sampling
    assert (body.temperature, body.top_p) == (sampling.temperature, sampling.top_p), "what was used is told"
    return sampling


def ollama_chat(to: ServedModel, **result: Any) -> Sampling:
    job: Any = read_ollama_chat({"messages": [USER], "options": result}, to, "req-1")
    sampling: Sampling = job.request.sampling
    return sampling


def ollama_generate(to: ServedModel, **result: Any) -> Sampling:
    job: Any = read_ollama_generate({"prompt": "Hi", "options": result}, to, "req-1")
    sampling: Sampling = job.request.sampling
    return sampling


PROTOCOLS: list[Callable[..., Sampling]] = [chat, completion, messages, response, ollama_chat, ollama_generate]


@pytest.mark.parametrize("ask", PROTOCOLS)
def test_what_the_model_s_makers_recommend_holds_where_a_request_says_nothing(ask: Callable[..., Sampling]) -> None:
    assert ask(served(RECOMMENDED)) == Sampling(**RECOMMENDED)
    assert ask(served(RECOMMENDED), temperature=None) == Sampling(**RECOMMENDED)
    assert ask(served()) == Sampling()


@pytest.mark.parametrize("ask", PROTOCOLS)
def test_what_a_request_says_holds(ask: Callable[..., Sampling]) -> None:
    made = ask(served(RECOMMENDED), temperature=0, top_p=1, top_k=-1)
    assert made == Sampling(**RECOMMENDED | {"temperature": 0.0, "top_p": 1.0, "top_k": 0})


@pytest.mark.parametrize("ask", PROTOCOLS)
def test_the_settings_override_the_recommendation(ask: Callable[..., Sampling]) -> None:
    made = ask(served(RECOMMENDED, override_generation_config={"temperature": 0.2, "top_k": -1}))
    assert made == Sampling(**RECOMMENDED | {"temperature": 0.2, "top_k": 0})


def test_an_option_of_ollama_s_switches_the_recommended_penalty_off() -> None:
    assert ollama_chat(served(RECOMMENDED), repeat_last_n=0).repetition_penalty == 1.0


def test_a_model_that_is_not_to_be_sampled_takes_the_likeliest_token_unless_a_temperature_is_stated() -> None:
    assert chat(served({"do_sample": False})).temperature == 0.0
    assert chat(served({"do_sample": False, "temperature": 0.7})).temperature == 0.7
    assert chat(served({"do_sample": False}), temperature=0.5).temperature == 0.5
    assert chat(served({"do_sample": True})).temperature == 1.0


NONSENSE = [float("nan"), float("inf"), -0.5, 99, "hot", "0.6", True, [0.6], {}, 10**400]


@pytest.mark.parametrize("value", NONSENSE, ids=str)
def test_what_makes_no_sense_in_the_file_is_left_out_with_a_warning(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = sampling_defaults({"temperature": value, "top_p": 0.9}, None)
    assert made == Sampling(top_p=0.9)
    assert "generation_config.json" in caplog.text and "temperature" in caplog.text


def test_null_and_what_is_for_other_programs_is_passed_over_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = sampling_defaults({"temperature": None, "eos_token_id": [1], "max_new_tokens": 9, "num_beams": 4}, None)
    assert made == Sampling() and not caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"temperature": "hot"}', "expected a number from 0 to 2"),
        ('{"temperature": NaN}', "expected a number"),
        ('{"tempreature": 1}', "did you mean temperature?"),
        ('{"max_new_tokens": 9}', "there are temperature, top_p, top_k, min_p, repetition_penalty"),
        ("[1]", "is not a JSON object"),
        ("{", "is not valid JSON"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"override_generation_config": text}, {})
    assert "--override-generation-config" in raised.value.message and words in raised.value.message


def test_clients_are_shown_what_holds() -> None:
    to = served(RECOMMENDED, override_generation_config={"min_p": 0})
    shown = {name: value for name, value in RECOMMENDED.items() if name != "min_p"}
    assert list_models([(STANDS, to)]).data[0].default_sampling_params == shown
    assert retrieve_model("default", served(), ()).default_sampling_params == {}
    assert "temperature 0.6\n" in show_ollama_model({}, to).parameters
    assert "repeat_penalty 1.05" in show_ollama_model({}, to).parameters


def test_the_fingerprint_tells_defaults_apart() -> None:
    assert served(RECOMMENDED).fingerprint != served().fingerprint
    assert json.dumps(served().fingerprint) == json.dumps(served({"eos_token_id": 2}).fingerprint)
