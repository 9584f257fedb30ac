from __future__ import annotations

import json
from typing import Any

import pytest

from ingot.errors import Unsupported
from ingot.text.chat_template.messages import TemplateMessage
from ingot.text.chat_template.traits import TemplateTraits
from ingot.text.prompt.tool_prompt import teach_tools
from ingot.text.tool_formats.registry import FORMATS, format_by_name
from tests.text.parser.answers import TOOLS, parsed, summary

IGNORANT = TemplateTraits(tools=False, calls=False, results=False)
SHOWN = [{"type": "function", "function": {"name": tool.name, "parameters": dict(tool.parameters)}} for tool in TOOLS]
HERMES = format_by_name("hermes")


def conversation(*messages: dict[str, Any]) -> list[TemplateMessage]:
    return [TemplateMessage(message, (at,)) for at, message in enumerate(messages)]


def calling(arguments: str, content: Any = None) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


USER = {"role": "user", "content": "Hi"}


def test_a_template_that_knows_tools_gets_nothing_more() -> None:
    lines = conversation(USER, calling("{}"), {"role": "tool", "tool_call_id": "c1", "content": "Sun"})
    assert teach_tools(lines, SHOWN, TemplateTraits(), HERMES) == (lines, ())


def test_tools_are_told_in_the_system_s_message() -> None:
    [first, *_], done = teach_tools(
        conversation({"role": "system", "content": "Be brief."}, USER), SHOWN, IGNORANT, HERMES
    )
    assert first.message["content"].startswith("Be brief.\n\n# Tools")
    assert '"get_weather"' in first.message["content"] and done == ("tools-taught",)
    [first, second], _ = teach_tools(conversation(USER), SHOWN, IGNORANT, HERMES)
    assert (first.role, first.sources, second.message) == ("system", (), USER)
    parts = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    [first, *_], _ = teach_tools(conversation(parts, USER), SHOWN, IGNORANT, HERMES)
    assert [part["text"][:8] for part in first.message["content"]] == ["Be brief", "\n\n# Tools"[:8]]


@pytest.mark.parametrize("format", [format for format in FORMATS if format.can_call], ids=lambda format: format.name)
def test_the_example_that_is_taught_can_be_parsed(format: Any) -> None:
    [first, _], _ = teach_tools(conversation(USER), SHOWN, IGNORANT, format)
    lesson = first.message["content"]
    example = lesson[lesson.index("once for each call:\n") :].partition("\n")[2].partition("\n\nWrite nothing")[0]
    example = example.replace("function_name", "get_weather").replace("argument_name", "city")
    story = [each for each in summary(parsed(format, [example])) if each[0] == "calls"]
    assert story == [("calls", "get_weather", {"city": "value"})]


def test_past_calls_are_written_as_the_model_writes_them() -> None:
    lines = conversation(USER, calling('{"city": "Köln"}', "Let me see."))
    [_, answer], done = teach_tools(lines, (), IGNORANT, HERMES)
    assert "tool_calls" not in answer.message and done == ("calls-written",)
    story = summary(parsed(HERMES, [answer.message["content"]]))
    assert story == [("says", "Let me see."), ("calls", "get_weather", {"city": "Köln"})]


def test_results_are_told_by_the_user_those_of_one_answer_together() -> None:
    results = [{"role": "tool", "tool_call_id": f"c{at}", "content": f"Result {at}"} for at in range(2)]
    lines, done = teach_tools(conversation(USER, calling("{}"), *results, USER), (), IGNORANT, HERMES)
    assert [line.role for line in lines] == ["user", "assistant", "user", "user"]
    assert lines[2].message["content"] == (
        "<tool_response>\nResult 0\n</tool_response>\n<tool_response>\nResult 1\n</tool_response>"
    )
    assert lines[2].sources == (2, 3) and done == ("calls-written", "results-told")


def test_a_template_that_knows_calls_but_not_tools_is_told_the_tools_alone() -> None:
    lines, done = teach_tools(conversation(USER, calling("{}")), SHOWN, TemplateTraits(tools=False), HERMES)
    assert done == ("tools-taught",) and lines[-1].message["tool_calls"]


@pytest.mark.parametrize("broken", ['{"city": ', "[1]", json.dumps("x")])
def test_arguments_that_are_no_object_are_written_as_one_that_holds_them(broken: str) -> None:
    [_, line], _ = teach_tools(conversation(USER, calling(broken)), (), IGNORANT, HERMES)
    assert json.dumps({"name": "get_weather", "arguments": {"_unparsed": broken}}) in line.message["content"]


def test_a_past_call_is_told_to_a_model_that_has_no_form_for_one() -> None:
    [_, line], done = teach_tools(conversation(USER, calling("{}")), (), IGNORANT, format_by_name("plain"))
    assert line.message["content"] == '{"name": "get_weather", "arguments": {}}' and done == ("calls-written",)


def test_what_cannot_be_taught_is_refused() -> None:
    with pytest.raises(Unsupported) as refused:
        teach_tools(conversation(USER), SHOWN, IGNORANT, format_by_name("plain"))
    assert refused.value.param == "tools"
    picture = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image_url", "image_url": {}}]}
    with pytest.raises(Unsupported, match="image_url"):
        teach_tools(conversation(USER, calling("{}"), picture), (), IGNORANT, HERMES)
