"""Fields of other servers: read as ours, passed over and named, or refused with what to send instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ingot.engine.request import Ended, SequenceEnded, TextDelta, ThinkingDelta, Timing, Usage
from ingot.errors import BadRequest, UnknownField, Unsupported
from ingot.protocol.anthropic.request import read_messages
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.openai.chat import ChatBody, read_chat
from ingot.protocol.openai.completions import read_completion
from ingot.protocol.responses.request import ResponseContext, read_response
from ingot.protocol.schema.foreign import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Alias, ForeignFields
from ingot.protocol.served import ServedModel
from tests.http.scripted import CARD, ByteTokenizer, settings

USER = {"role": "user", "content": "Hi"}
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}{# </think> #}"


def served(*, strict: bool = False, template: str = THINKING) -> ServedModel:
    tokenizer: Any = ByteTokenizer(template)
    return ServedModel.of(CARD, tokenizer, settings(strict=strict))


def chat(strict: bool = False, **body: Any) -> GenerationTask:
    return read_chat({"messages": [USER], **body}, served(strict=strict), "chatcmpl-1")


def completion(strict: bool = False, **body: Any) -> GenerationTask:
    return read_completion({"prompt": "Hi", **body}, served(strict=strict), "cmpl-1")


def response(strict: bool = False, **body: Any) -> GenerationTask:
    around = ResponseContext(None, {})
    return read_response({"input": "Hi", **body}, served(strict=strict), "resp_" + "0" * 24, around).first


def messages(strict: bool = False, **body: Any) -> GenerationTask:
    return read_messages({"messages": [USER], "max_tokens": 9, **body}, served(strict=strict), "msg_1")


PROTOCOLS: list[tuple[Callable[..., GenerationTask], ForeignFields]] = [
    (chat, CHAT),
    (completion, COMPLETIONS),
    (response, RESPONSES),
    (messages, MESSAGES),
]
EVERY = [(read, name) for read, table in PROTOCOLS for name in table]


def ignored(job: GenerationTask) -> list[str]:
    assert job.head is not None
    return job.head.ignored


@pytest.mark.parametrize(("read", "name"), EVERY)
def test_null_asks_for_nothing(read: Callable[..., GenerationTask], name: str) -> None:
    assert ignored(read(**{name: None})) == []
    assert ignored(read(strict=True, **{name: None})) == []


@pytest.mark.parametrize("read", [read for read, _ in PROTOCOLS])
def test_null_under_any_name_asks_for_nothing(read: Callable[..., GenerationTask]) -> None:
    assert ignored(read(temprature=None, whatever=None)) == []
    with pytest.raises(UnknownField):
        read(strict=True, whatever=None)


@pytest.mark.parametrize("read", [chat, completion, response])
@pytest.mark.parametrize("name", ["max_new_tokens", "n_predict", "num_predict"])
def test_other_names_of_the_limit_limit(read: Callable[..., GenerationTask], name: str) -> None:
    assert read(**{name: 5}).request.max_tokens == 5
    assert read(**{name: -1}).request.max_tokens is None
    with pytest.raises(BadRequest) as raised:
        read(**{name: "x"})
    assert raised.value.param == name


@pytest.mark.parametrize("read", [chat, completion, response])
def test_other_names_are_read_as_ours(read: Callable[..., GenerationTask]) -> None:
    made = read(repeat_penalty=1.2, stop_sequences=["END"]).request
    assert made.sampling.repetition_penalty == 1.2 and made.stop.strings == ("END",)
    assert messages(stop=["END"]).request.stop.strings == ("END",)


def test_our_name_wins_over_another_which_is_named() -> None:
    job = chat(max_completion_tokens=3, max_new_tokens=5)
    assert job.request.max_tokens == 3 and ignored(job) == ["max_new_tokens"]


@pytest.mark.parametrize("read", [chat, completion, response])
def test_what_has_no_effect_is_named_unless_it_asks_for_nothing(read: Callable[..., GenerationTask]) -> None:
    options = {"top_a": 0.2, "models": ["a", "b"], "return_token_ids": True, "tool_stream": False, "provider": {"x": 1}}
    assert sorted(ignored(read(**options))) == sorted(options)
    assert ignored(read(top_a=0, models=[], return_token_ids=False, tool_stream=True, skip_special_tokens=True)) == []
    with pytest.raises(Unsupported, match="strict"):
        read(strict=True, top_a=0.2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guided_json": {"type": "object"}}, r"structured_outputs\.json"),
        ({"use_beam_search": True}, "are sampled"),
        ({"bad_words": ["x"]}, "logit_bias"),
        ({"extra_body": {"top_k": 3}}, "into the body itself"),
    ],
)
def test_what_would_change_the_answer_is_refused_with_what_to_send(body: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words) as raised:
        chat(**body)
    assert raised.value.param == next(iter(body))


def test_no_foreign_name_is_one_of_ours_and_every_other_name_leads_to_one() -> None:
    names = set(ChatBody.__dataclass_fields__)
    assert not names & CHAT.keys()
    assert all(meant.field in names for meant in CHAT.values() if isinstance(meant, Alias))


@pytest.mark.parametrize("read", [chat, completion, response])
def test_minus_one_and_an_empty_stop_are_none(read: Callable[..., GenerationTask]) -> None:
    made = read(top_k=-1, stop="").request
    assert (made.sampling.top_k, made.stop.strings) == (0, ())
    assert read(stop=["", "END"]).request.stop.strings == ("END",)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit(name: str) -> None:
    assert chat(**{name: -1}).request.max_tokens is None
    assert completion(max_tokens=-1).request.max_tokens is None
    assert response(max_output_tokens=-1).request.max_tokens is None
    with pytest.raises(BadRequest, match="-1 for no limit"):
        chat(**{name: -2})


# Thinking in the words of other servers


def prompt(**body: Any) -> str:
    return bytes(chat(**body).request.prompts[0]).decode()


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning": {"enabled": True}},
        {"reasoning": {"effort": "high"}},
        {"reasoning": {"max_tokens": 100}},
        {"thinking": {"type": "enabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 5}, "enable_thinking": True},
    ],
)
def test_thinking_is_switched_on_in_any_words(message: dict[str, Any]) -> None:
    assert prompt(**message) == "Hi<think>"


@pytest.mark.parametrize(
    "message",
    [{"reasoning": {"enabled": False}}, {"reasoning": {"effort": "none"}}, {"thinking": {"type": "disabled"}}],
)
def test_thinking_is_switched_off_in_any_words(message: dict[str, Any]) -> None:
    assert "<think>" not in prompt(**message)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"reasoning": {"enabled": False}, "enable_thinking": True}, "reasoning.enabled"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": 5}, "thinking": {"type": "auto", "budget_tokens": 6}}, "thinking.budget_tokens"),
    ],
)
def test_words_that_differ_are_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match="send one") as raised:
        chat(**message)
    assert raised.value.param == param


@pytest.mark.parametrize("message", [{"reasoning": {"exclude": True}}, {"include_reasoning": False}])
@pytest.mark.parametrize("stream", [True, False])
def test_thinking_that_is_not_wanted_is_left_out_of_the_answer(message: dict[str, Any], stream: bool) -> None:
    events = [ThinkingDelta(0, "Hm."), TextDelta(0, "Yes"), SequenceEnded(0, "stop", None, 2)]
    for hidden in (True, False):
        view: Any = chat(stream=stream, **message if hidden else {}).view
        answer = []
        for event in (*events, Ended(Usage(), Timing())):
            answer += view.chunks(event) if stream else [view.take(event)]
        assert ("Hm." in str(answer if stream else view.body())) is not hidden


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"enable_thinking": True}, ["enable_thinking"]),
        ({"reasoning_effort": "high"}, ["reasoning_effort"]),
        ({"thinking_budget": 5}, ["thinking_budget"]),
        ({"reasoning": {"enabled": True, "effort": "low"}}, ["reasoning.enabled", "reasoning.effort"]),
    ],
)
def test_what_a_model_that_does_not_think_cannot_heed_is_named_as_it_was_said(
    message: dict[str, Any], named: list[str]
) -> None:
    unthinking = served(template="{% for m in messages %}{{ m.content }}{% endfor %}>")
    assert ignored(read_chat({"messages": [USER], **message}, unthinking, "chatcmpl-1")) == named
    assert ignored(chat(**message)) == []


def test_no_effort_settles_it_and_the_switch_is_named() -> None:
    assert ignored(chat(enable_thinking=True, reasoning_effort="none")) == ["enable_thinking"]
    assert "<think>" not in prompt(enable_thinking=True, reasoning_effort="none")
