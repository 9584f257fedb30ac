"""The families' own templates write past calls and thinking as our tables read them."""

from __future__ import annotations

import json

import pytest

from ingot.text.chat_template.chat_template import ChatTemplate
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.registry import find_format
from tests.text.parser.answers import TOOLS, parsed, summary
from tests.text.tool_formats.test_registry import real_template

QUESTION = "What now?"
WEATHER = {"city": 'Köln <am Rhein>\n"it\'s"', "days": 3, "tags": ["a", "b"], "where": {"x": [None, 1.5]}}
WITHOUT_NULL = {**WEATHER, "metric": True, "where": {"x": [{"y": False}, 1.5], "item": "z"}}
SHOWN = [{"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS]


def call(name: str, arguments: dict[str, object]) -> dict[str, object]:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize(
    "model",
    [
        "qwen-2.5",
        "qwen-3",
        "qwen-3.5",
        "qwen-3.6",
        "qwq-32b",
        "deepseek-r1",
        "deepseek-r1-0528-qwen3-8b",
        "deepseek-v3.1",
        "glm-4.5v",
        "glm-4.6v-flash",
        "glm-4.7-flash",
        "glm-5",
        "glm-5.2",
        "minimax",
        "minimax-m3",
    ],
)
def test_calls_that_a_real_template_writes_are_read_back(model: str) -> None:
    source = real_template(model)
    weather = WITHOUT_NULL if model == "minimax-m3" else WEATHER  # its template has no way to write one
    question = {"role": "user", "content": QUESTION}
    calling = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [call("get_weather", weather), call("write_file", {"path": "", "content": " x\n"})],
    }
    prompt = ChatTemplate(source).render([question, calling], tools=SHOWN, add_generation_prompt=False)
    answer = prompt[prompt.rindex(QUESTION) + len(QUESTION) :]
    story = summary(parsed(find_format(source, "").format, answer))
    assert [each for each in story if each[0] not in ("says", "thinks")] == [
        ("calls", "get_weather", weather),
        ("calls", "write_file", {"path": "", "content": " x\n"}),
    ]


@pytest.mark.parametrize(
    ("model", "extra", "start"),
    [
        ("qwen-3", {}, "unopened"),
        ("qwen-3", {"enable_thinking": False}, "unopened"),
        ("qwen-3.5", {}, "opened"),
        ("qwen-3.5", {"enable_thinking": False}, "unopened"),
        ("qwq-32b", {}, "opened"),
        ("deepseek-r1", {}, "opened"),
        ("deepseek-v3.1", {"thinking": True}, "opened"),
        ("deepseek-v3.1", {}, "unopened"),
        ("glm-4.5v", {}, "unopened"),
        ("glm-4.7-flash", {}, "opened"),
        ("glm-4.7-flash", {"enable_thinking": False}, "unopened"),
        ("minimax", {}, "opened"),
        ("minimax-m3", {"thinking_mode": "enabled"}, "opened"),
    ],
)
def test_a_real_prompt_tells_whether_it_opened_the_thinking(model: str, extra: dict[str, object], start: str) -> None:
    source = real_template(model)
    prompt = ChatTemplate(source).render([{"role": "user", "content": QUESTION}], extra=extra)
    assert ThinkingStart.after(prompt, find_format(source, "").format.thinking) is ThinkingStart(start)
