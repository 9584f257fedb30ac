"""Tools, thinking and the form of the answer: one decision for what is rendered, decoded and parsed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from ingot.config import load_config
from ingot.errors import BadRequest, ConfigError, Unsupported
from ingot.protocol.chat.ask import ChatInput, ForcedToolChoice, ThinkingOptions, ToolDefinition
from ingot.protocol.chat.preparation import PreparedChat, prepare_chat
from ingot.protocol.served import ServedModel
from ingot.text.grammar.calls import GrammarTool
from ingot.text.grammar.grammars import Grammars
from ingot.text.parser.parser import ThinkingStart
from tests.http.scripted import CARD, ByteTokenizer, settings

USER = {"role": "user", "content": "Hi"}
LOOK = ToolDefinition("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
SWITCHED = (
    "{% if tools %}<tool_call>{% for t in tools %}{{ t.function.name }} {% endfor %}|{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}><think>\n{% endif %}"
UNTHINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def served(template: str, **changes: Any) -> ServedModel:
    tokenizer: Any = ByteTokenizer(template)
    return ServedModel.of(CARD, tokenizer, settings(**changes))


def ask(template: str, *, changes: dict[str, Any] | None = None, **values: Any) -> PreparedChat:
    return prepare_chat(served(template, **(changes or {})), ChatInput([USER], **values))


def prompt(found: PreparedChat) -> str:
    return bytes(found.prompt).decode()


def test_tools_are_shown_and_their_calls_read() -> None:
    found = ask(SWITCHED, tools=(LOOK,))
    assert prompt(found).startswith("<tool_call>look |")
    assert found.reading is not None and [tool.name for tool in found.reading.tools] == ["look"]
    assert not found.reading.one_call and not found.reading.must_call


def test_tool_choice_none_shows_no_tools_and_reads_no_calls() -> None:
    found = ask(SWITCHED, tools=(LOOK,), choice="none")
    assert "look" not in prompt(found)
    assert found.reading is not None and found.reading.tools == ()


def test_without_parallel_calls_an_answer_ends_with_its_first() -> None:
    found = ask(SWITCHED, tools=(LOOK,), parallel=False)
    assert found.reading is not None and found.reading.one_call


def test_a_forced_answer_is_read_as_one_that_must_call() -> None:
    for choice in ("required", ForcedToolChoice("look")):
        found = ask(SWITCHED, tools=(LOOK,), choice=choice)
        assert found.reading is not None and found.reading.must_call


SHOWING = SWITCHED.replace("{{ t.function.name }}", "{{ t | tojson }}")
SCHEMA = {
    "type": "object",
    "properties": {
        "zone": {"type": "string"},
        "at": {"type": "object", "properties": {"y": {}, "x": {}}},
        "city": {"type": "string"},
    },
    "required": ["city"],
}


def properties(schema: Mapping[str, Any]) -> list[str]:
    return [*schema["properties"], *schema["properties"]["at"]["properties"]]


@pytest.mark.parametrize(
    ("history", "order"),
    [("stable", ["city", "at", "zone", "x", "y"]), ("official", ["zone", "at", "city", "y", "x"])],
)
def test_arguments_are_held_to_the_order_in_which_the_prompt_shows_them(
    history: Any, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked: list[GrammarTool] = []
    monkeypatch.setattr(Grammars, "tools", lambda self, format, tools, *rest, **more: blocked.extend(tools))
    found = ask(SHOWING, tools=(ToolDefinition("look", "Looks.", SCHEMA),), choice="required", history=history)
    shown = json.loads(prompt(found).removeprefix("<tool_call>").partition(" |")[0])
    assert properties(shown["function"]["parameters"]) == order
    assert properties(blocked[0].parameters) == order
    assert found.reading is not None and properties(found.reading.tools[0].parameters) == order


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"tools": (LOOK,), "choice": ForcedToolChoice("lok")}, "tool_choice"),
        ({"choice": "required"}, "tool_choice"),
        ({"tools": (LOOK, LOOK)}, "tools.1"),
        ({"tools": (ToolDefinition("a b"),)}, "tools.0"),
        ({"tools": (ToolDefinition("x" * 129),)}, "tools.0"),
        ({"tools": (ToolDefinition("x", parameters={"type": "string"}),)}, "tools.0"),
    ],
)
def test_tools_that_make_no_sense_are_refused_by_name(values: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        ask(SWITCHED, **values)
    assert raised.value.param == param


def test_a_choice_of_an_unknown_tool_names_the_nearest() -> None:
    with pytest.raises(BadRequest, match="Did you mean 'look'"):
        ask(SWITCHED, tools=(LOOK,), choice=ForcedToolChoice("lok"))


def test_a_format_without_calls_refuses_tools() -> None:
    with pytest.raises(Unsupported) as raised:
        ask(SWITCHED, tools=(LOOK,), tool_format="plain")
    assert raised.value.param == "tools"


def test_a_template_with_a_switch_is_told_to_think_or_not() -> None:
    assert prompt(ask(SWITCHED, thinking=ThinkingOptions(enabled=False))).endswith("</think>\n\n")
    assert prompt(ask(SWITCHED, thinking=ThinkingOptions(effort="none"))).endswith("</think>\n\n")
    assert prompt(ask(SWITCHED, thinking=ThinkingOptions(enabled=True))).endswith(">")


def test_what_the_request_gives_the_template_by_name_stands() -> None:
    found = ask(SWITCHED, thinking=ThinkingOptions(enabled=True), variables={"enable_thinking": False})
    assert prompt(found).endswith("</think>\n\n")


def test_a_template_that_always_opens_thinking_gets_it_closed_where_it_is_unwanted() -> None:
    opened = ask(OPENED)
    assert opened.reading is not None and opened.reading.thinking is ThinkingStart.OPENED
    closed = ask(OPENED, thinking=ThinkingOptions(enabled=False))
    assert prompt(closed).endswith("<think>\n</think>\n\n")
    assert closed.reading is not None and closed.reading.thinking is ThinkingStart.UNOPENED


def test_the_servers_settings_hold_where_the_request_says_nothing() -> None:
    assert prompt(ask(SWITCHED, changes={"thinking": "off"})).endswith("</think>\n\n")
    found = ask(SWITCHED, changes={"thinking": "off"}, thinking=ThinkingOptions(enabled=True))
    assert prompt(found).endswith(">")


def test_a_model_that_cannot_think_says_that_it_ignored_the_wish() -> None:
    assert ask(UNTHINKING, thinking=ThinkingOptions(effort="high")).ignored == ("reasoning_effort",)
    assert ask(UNTHINKING).ignored == ()
    assert ask(SWITCHED, thinking=ThinkingOptions(effort="high")).ignored == ()


def test_past_calls_are_counted_for_families_that_number_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call, call]}, USER]
    found = prepare_chat(served(SWITCHED), ChatInput(messages, tools=(LOOK,)))
    assert found.reading is not None and found.reading.past_calls == 2


MOODY = (
    "{% for m in messages %}{{ m.content }}{% endfor %}[{{ mood }}]{% if enable_thinking %}<think>\n{% endif %}"
    "{# </think> #}"
)


def test_the_settings_give_the_template_s_variables_where_a_request_does_not() -> None:
    settled = {"default_chat_template_kwargs": {"mood": "glad"}}
    assert "[glad]" in prompt(ask(MOODY, changes=settled))
    assert "[grim]" in prompt(ask(MOODY, changes=settled, variables={"mood": "grim"}))


def test_what_a_request_says_of_thinking_beats_the_settings_variables_and_they_beat_the_setting() -> None:
    off = {"default_chat_template_kwargs": {"enable_thinking": False}, "thinking": "on"}
    assert "<think>" not in prompt(ask(MOODY, changes=off))
    assert "<think>" in prompt(ask(MOODY, changes=off, thinking=ThinkingOptions(True)))
    assert "<think>" in prompt(ask(MOODY, changes=off, variables={"enable_thinking": True}))


def test_a_variable_of_the_settings_that_the_template_does_not_read_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"reads no 'temper'; it reads: enable_thinking, mood"):
        served(MOODY, default_chat_template_kwargs={"temper": 1})


@pytest.mark.parametrize("value", ["[1]", '"x"', "{", '{"mood": null}', '{"mood": [1]}'])
def test_variables_of_the_settings_are_an_object_of_plain_values(value: str) -> None:
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
        load_config({"default_chat_template_kwargs": value}, {})
