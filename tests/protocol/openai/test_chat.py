"""What a chat body becomes, and that every field of OpenAI's schema is honoured or refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from openai.types.chat import completion_create_params as sdk

from ingot.engine.request import CallArguments, CallBegan, CallEnded, Ended, Request, Sampling, Stop, Timing, Usage
from ingot.errors import BadRequest, ModelNotFound, UnknownField, Unsupported
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.openai.chat import ChatBody, read_chat
from ingot.protocol.openai.chat_answers import StreamedChat, WholeChat
from ingot.protocol.served import ServedModel
from tests.http.scripted import CARD, ByteTokenizer, settings

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLED = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{% endfor %}"
)


def served(template: str | None = None, **changes: Any) -> ServedModel:
    tokenizer: Any = ByteTokenizer(template) if template else ByteTokenizer()
    return ServedModel.of(CARD, tokenizer, settings(**changes))


def read(*, template: str | None = None, strict: bool = False, **body: Any) -> GenerationTask:
    return read_chat({"messages": [USER], **body}, served(template, strict=strict), "chatcmpl-1")


def request(**body: Any) -> Request:
    return read(**body).request


def prompt(**body: Any) -> str:
    return bytes(request(**body).prompts[0]).decode()


def test_every_field_of_the_official_schema_is_known() -> None:
    official = set(sdk.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert official <= {field.name for field in dataclasses.fields(ChatBody)}


def test_the_least_that_can_be_asked() -> None:
    made = request()
    assert made.id == "chatcmpl-1"
    assert (made.max_tokens, made.n, made.sampling, made.stop) == (None, 1, Sampling(), Stop())
    assert made.deadline is not None


def test_the_prompt_is_the_rendered_conversation_without_a_second_beginning() -> None:
    assert prompt() == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("temperature", 0.5, {"temperature": 0.5}),
        ("temperature", 0, {"temperature": 0.0}),
        ("top_p", 0.9, {"top_p": 0.9}),
        ("top_k", 40, {"top_k": 40}),
        ("min_p", 0.1, {"min_p": 0.1}),
        ("presence_penalty", -1, {"presence_penalty": -1.0}),
        ("frequency_penalty", 1.5, {"frequency_penalty": 1.5}),
        ("repetition_penalty", 1.1, {"repetition_penalty": 1.1}),
        ("logit_bias", {"7": -100, "8": 1.5}, {"logit_bias": ((7, -100.0), (8, 1.5))}),
        ("seed", 42, {"seed": 42}),
        ("seed", -1, {"seed": 2**64 - 1}),
        ("logprobs", True, {"logprobs": 0}),
    ],
)
def test_sampling_fields_reach_the_engine(field: str, value: Any, part: dict[str, Any]) -> None:
    assert request(**{field: value}).sampling == dataclasses.replace(Sampling(), **part)


@pytest.mark.parametrize(
    ("body", "stop"),
    [
        ({"stop": "END"}, Stop(strings=("END",))),
        ({"stop": ["a", "b"]}, Stop(strings=("a", "b"))),
        ({"stop_token_ids": [5, 6]}, Stop(token_ids=frozenset({5, 6}))),
        ({"ignore_eos": True}, Stop(ignore_eos=True)),
        ({"min_tokens": 3}, Stop(min_tokens=3)),
        ({"include_stop_str_in_output": True, "stop": "x"}, Stop(strings=("x",), keep=True)),
    ],
)
def test_stop_fields_reach_the_engine(body: dict[str, Any], stop: Stop) -> None:
    assert request(**body).stop == stop


@pytest.mark.parametrize(
    "body", [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_tokens": 9, "max_completion_tokens": 12}]
)
def test_both_names_of_the_limit_are_taken_and_the_lower_holds(body: dict[str, int]) -> None:
    assert request(**body).max_tokens == 9


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "me", "safety_identifier": "x", "prompt_cache_key": "k", "metadata": {"a": "b"}},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"store": False},
        {"modalities": ["text"]},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"functions": [], "function_call": "none"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"stream_options": {"include_usage": True}},
        {"prompt_cache_retention": "24h"},
        dict.fromkeys(field.name for field in dataclasses.fields(ChatBody) if field.name != "messages"),
    ],
    ids=lambda body: " ".join(body)[:30],
)
def test_what_asks_for_nothing_special_is_taken(harmless: dict[str, Any]) -> None:
    read(**harmless)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "a+"),
        ("ebnf", 'root ::= "a"'),
        ("structural_tag", {"structures": []}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("audio", {"voice": "x", "format": "wav"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("verbosity", "low"),
        ("store", True),
        ("service_tier", "flex"),
        ("service_tier", "priority"),
        ("moderation", {"model": "m"}),
        ("prompt_cache_options", {"mode": "explicit"}),
        ("chat_template", "{{ 1 }}"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(Unsupported) as raised:
        read(**{field: value})
    assert raised.value.param is not None and raised.value.param.split(".")[0] == field
    assert field in raised.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1025]}, "stop.0"),
        ({"stop": ["ok", 3]}, "stop.1"),
        ({"stop_token_ids": [300]}, "stop_token_ids.0"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"metadata": {str(at): "x" for at in range(17)}}, "metadata"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages.0.content.0.text"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_is_out_of_bounds_is_refused_where_it_stands(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read(**body)
    assert raised.value.param == param


@pytest.mark.parametrize("name", ["org/toy", "default"])
def test_the_model_answers_to_its_name_and_to_default(name: str) -> None:
    read(model=name)


def test_another_model_is_a_404() -> None:
    with pytest.raises(ModelNotFound, match="org/toy"):
        read(model="gpt-4o")


def test_a_misspelt_field_is_a_400_that_names_the_right_one() -> None:
    with pytest.raises(UnknownField, match="did you mean 'max_tokens'"):
        read(max_token=5)


def test_strict_refuses_what_nobody_knows() -> None:
    with pytest.raises(UnknownField, match="quux"):
        read(quux=1, strict=True)


@pytest.mark.parametrize("part", ["image_url", "input_audio", "audio_url", "file", "video_url"])
def test_media_is_refused_by_name(part: str) -> None:
    with pytest.raises(Unsupported, match=part) as raised:
        read(messages=[{"role": "user", "content": [{"type": part}]}])
    assert raised.value.param == "messages.0.content.0.type"


def test_the_refusal_of_a_audio_names_what_to_use() -> None:
    with pytest.raises(Unsupported, match=r"'audio_url'.*input_audio.*--audio-model.*not fetched"):
        read(messages=[{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "https://a.b/c"}}]}])
    with pytest.raises(Unsupported, match=r"'input_audio'.*--audio-model"):
        read(messages=[{"role": "user", "content": [{"type": "input_audio"}]}])


def test_text_parts_reach_the_template() -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    text = prompt(messages=[{"role": "user", "content": parts}])
    assert "One" in text and "Two" in text


def test_every_role_is_rendered() -> None:
    result = [
        {"role": "developer", "content": "Be"},
        USER,
        {"role": "assistant", "content": None, "refusal": "No"},
        USER,
    ]
    assert "system\nBe" in prompt(messages=result)
    assert "assistant\nNo" in prompt(messages=result)


def test_a_history_of_tool_calls_is_shown_also_where_the_template_knows_none() -> None:
    history = [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    assert "look" in prompt(messages=history, template=TOOLED)
    assert '<tool_call>\n{"name": "look"' in prompt(messages=history)


def test_a_template_variable_is_set_where_the_template_reads_it() -> None:
    assert prompt(chat_template_kwargs={"mood": "glad"}).endswith("assistant\n[glad] ")
    with pytest.raises(UnknownField, match=r"enable_thought.*It reads: mood"):
        read(chat_template_kwargs={"enable_thought": False})
    with pytest.raises(UnknownField):
        read(chat_template_kwargs={"messages": "x"})


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_a_switch_of_thinking_that_the_template_lacks_says_what_the_field_says(name: str) -> None:
    switched, by_field = read(chat_template_kwargs={name: False, "mood": "glad"}), read(enable_thinking=False)
    assert switched.head.ignored == [f"chat_template_kwargs.{name}"] and by_field.head.ignored == ["enable_thinking"]
    with pytest.raises(BadRequest, match=f"chat_template_kwargs.{name}"):
        read(chat_template_kwargs={name: "no"})


def test_the_prompt_may_end_after_the_last_message() -> None:
    assert prompt(add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize("result", ["Well", "end", "Well, ", [{"type": "text", "text": "Well"}]])
def test_the_last_message_may_be_continued(result: Any) -> None:
    text = prompt(messages=[USER, {"role": "assistant", "content": result}], continue_final_message=True)
    assert text.endswith("assistant\n" + (result if isinstance(result, str) else "Well"))


def test_what_is_said_of_the_cache_reaches_the_engine() -> None:
    assert (request().cache, request().salt) == (True, "")
    made = request(cache="off", cache_salt="tenant")
    assert (made.cache, made.salt) == (False, "tenant")
    assert (request(cache="exact").cache, request(cache="exact").exact, request().exact) == (True, True, False)


def test_a_model_without_a_template_says_where_to_go() -> None:
    bare = ServedModel.of(CARD, ByteTokenizer(None), settings())  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="/v1/completions"):
        read_chat({"messages": [USER]}, bare, "x")


def test_messages_of_which_the_template_makes_nothing_are_refused() -> None:
    with pytest.raises(BadRequest, match="the prompt is empty") as raised:
        read(template="{% for m in messages %}{{ m.content }}{% endfor %}", messages=[{"role": "user", "content": ""}])
    assert raised.value.param == "messages"


def test_the_view_is_what_was_asked_for() -> None:
    assert isinstance(read().view, WholeChat)
    assert isinstance(read(stream=True).view, StreamedChat)


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
RUN = {"type": "custom", "custom": {"name": "run", "description": "Runs it."}}
SHOWING = "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{{ messages[-1].content }}"


def test_of_the_tools_those_that_are_allowed_are_shown() -> None:
    chosen = {"type": "function", "function": {"name": "look"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chosen]}}
    made = read(template=SHOWING, tools=[LOOK, RUN], tool_choice=choice).request
    assert made.reading is not None
    assert [tool.name for tool in made.reading.tools] == ["look"] and made.reading.must_call
    chosen["function"]["name"] = "lok"
    with pytest.raises(BadRequest, match="Did you mean 'look'"):
        request(tools=[LOOK, RUN], tool_choice=choice)


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_called_with_a_text(stream: bool) -> None:
    view = read(template=SHOWING, tools=[RUN], stream=stream).view
    events = [
        CallBegan(0, 0, "call_1", "run"),
        CallArguments(0, 0, '{"input": "a \\"b'),
        CallArguments(0, 0, '\\" c"}'),
        CallEnded(0, 0, True),
    ]
    if isinstance(view, WholeChat):
        for event in events:
            view.take(event)
        view.take(Ended(Usage(), Timing()))
        [call] = view.body().choices[0].message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "run", 'a "b" c')
        return
    assert isinstance(view, StreamedChat)
    deltas = [chunk.choices[0].delta.tool_calls[0] for event in events for chunk in view.chunks(event)]
    assert (deltas[0].type, deltas[0].custom.name) == ("custom", "run")
    assert "".join(delta.custom.input for delta in deltas) == 'a "b" c'


def test_of_a_custom_tool_s_grammars_one_is_held_to_and_the_other_is_told() -> None:
    def query(syntax: str) -> GenerationTask:
        grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": "[a-z]+"}}
        custom = {"type": "custom", "custom": {"name": "run", "format": grammar}}
        return read(template=SHOWING, tools=[custom])

    blocked, answer = query("regex"), query("lark")
    assert blocked.request.reading is not None and blocked.request.reading.tools[0].strict
    assert blocked.head.ignored == [] and answer.head.ignored == ["tools.run.format"]


def test_past_calls_of_custom_tools_are_shown() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": "ls"}}
    result = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    answered = [*result, {"role": "tool", "tool_call_id": "c1", "content": "a.txt"}]
    template = "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function }}{% endif %}{% endfor %}"
    assert "ls" in prompt(template=template, tools=[RUN], messages=answered)


def test_an_object_may_be_held_to_a_schema_where_other_servers_take_one() -> None:
    form = {"type": "json_object", "schema": {"type": "object", "required": ["n"], "properties": {"n": {"const": 1}}}}
    plain = request(response_format={"type": "json_object"}).grammar
    blocked = request(response_format=form).grammar
    assert blocked is not None and blocked is not plain


def test_a_structural_tag_holds_what_its_trigger_begins() -> None:
    tag = {"begin": "<call=ls>", "schema": {"type": "object"}, "end": "</call>"}
    form = {"type": "structural_tag", "structures": [tag], "triggers": ["<call="]}
    assert request(response_format=form).grammar is not None
    with pytest.raises(BadRequest, match="No trigger is the beginning of the tag '<call=ls>'"):
        request(response_format=form | {"triggers": ["<tool"]})
    with pytest.raises(Unsupported, match="structural_tag"):
        request(structured_outputs={"structural_tag": tag})
