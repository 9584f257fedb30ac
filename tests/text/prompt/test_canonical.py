from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.prompt.canonical import (
    canonical_messages,
    conversation_keys,
    key_with_answer,
    ordered_tools,
    reasoning_of,
)

HEADER = "x-anthropic-billing-header: cc_version=2.1.77.{}; cc_entrypoint=cli; cch={};"
RULES = "You are an agent."


def system(content: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": content}, {"role": "user", "content": "Hi"}]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    "form",
    [
        lambda header: f"{header}\n{RULES}",
        lambda header: f"{header}\n\n{RULES}",
        lambda header: [part(header), part(RULES)],
        lambda header: [part(f"{header}\n{RULES}")],
    ],
)
def test_a_header_that_changes_with_each_request_is_taken_out(form: Any) -> None:
    first, names = canonical_messages(system(form(HEADER.format("a1b", "00000"))))
    second, _ = canonical_messages(system(form(HEADER.format("c3d", "12f4e"))))
    assert first == second and names == ("claude-code-billing-header",)
    assert first[0]["content"] in (RULES, [part(RULES)])


def test_a_system_message_of_nothing_but_the_header_is_left_empty() -> None:
    assert canonical_messages(system(HEADER.format("a", "b")))[0][0]["content"] == ""
    assert canonical_messages(system([part(HEADER.format("a", "b"))]))[0][0]["content"] == ""


@pytest.mark.parametrize(
    "messages",
    [
        system(RULES),
        system(f"{RULES}\n" + HEADER.format("a", "b")),
        system("x-anthropic-billing-header is the name of a header."),
        system(HEADER.format("a", "b") + " and more words on the same line"),
        [{"role": "user", "content": HEADER.format("a", "b")}],
        [{"role": "system", "content": None}],
        [{"role": "system", "content": [{"type": "image_url"}]}],
        [],
    ],
)
def test_everything_else_stays_as_it_is(messages: list[dict[str, Any]]) -> None:
    assert canonical_messages(messages) == (messages, ())


TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Edits.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "Where.", "default": {"b": 1, "a": 2}},
                "new": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]},
                "zone": {"$ref": "#/$defs/zone"},
                "at": {"type": "object", "properties": {"y": {"type": "integer"}, "x": {}}, "required": ["x", "y"]},
            },
            "required": ["path", "new"],
            "$defs": {"zone": {"enum": ["b", "a"], "type": "string"}},
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def shuffled(value: Any, draw: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key], draw) for key in draw(st.permutations(list(value)))}
    return [shuffled(each, draw) for each in value] if isinstance(value, list) else value


@given(st.data())
def test_a_tool_reads_the_same_whatever_order_its_keys_came_in(data: st.DataObject) -> None:
    written = json.dumps(ordered_tools([shuffled(TOOL, data.draw)]))
    assert written == json.dumps(ordered_tools([TOOL]))
    assert json.loads(written) == [TOOL]


def test_required_arguments_come_first_and_in_their_own_order() -> None:
    parameters = ordered_tools([TOOL])[0]["function"]["parameters"]
    assert list(parameters["properties"]) == ["path", "new", "at", "zone"]
    assert list(parameters["properties"]["at"]["properties"]) == ["x", "y"]
    assert parameters["$defs"]["zone"]["enum"] == ["b", "a"]
    assert list(ordered_tools([TOOL])[0]["function"]) == ["name", "description", "parameters", "strict"]


def test_tools_stay_in_the_order_they_were_given_in() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("b", "a", "c")]
    assert [tool["function"]["name"] for tool in ordered_tools(tools)] == ["b", "a", "c"]


def called(arguments: str, **more: Any) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}], **more},
    ]


def name(messages: list[dict[str, Any]], salt: str = "", ids: bool = False) -> bytes:
    return conversation_keys(messages, salt, ids=ids)[-1]


def test_a_conversation_is_the_same_however_the_client_writes_it() -> None:
    ours = name(called('{"a": 1.0, "b": "é"}'))
    assert ours == name(called('{\n "b": "\\u00e9",\n "a": 1}'))
    assert ours == name(called('{"a": 1, "b": "é"}', reasoning_content="Hm."))
    assert ours == name(called('{"a": 1, "b": "é"}', content=""))
    parts = [{"role": "user", "content": [part("Hi")]}]
    assert name(parts) == name([{"role": "user", "content": "Hi"}])
    assert name([{"role": "developer", "content": "x"}]) == name([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "other",
    [
        called('{"a": 2, "b": "é"}'),
        called('{"a": 1, "b": "é"}', content="So."),
        called('{"a": true, "b": "é"}'),
        called('{"a": "1", "b": "é"}'),
        called("not json"),
        called('{"a": 1, "b": "é"}')[:1],
    ],
)
def test_another_conversation_has_another_name(other: list[dict[str, Any]]) -> None:
    assert name(other) != name(called('{"a": 1, "b": "é"}'))


def test_salts_set_conversations_apart() -> None:
    assert name(called("{}"), "mine") != name(called("{}"), "yours")


def test_the_ids_of_calls_count_only_where_they_are_shown() -> None:
    other = called("{}")
    other[1]["tool_calls"][0]["id"] = "2"
    assert name(other) == name(called("{}"))
    assert name(other, ids=True) != name(called("{}"), ids=True)


def test_an_answer_names_the_conversation_that_its_echo_will_have() -> None:
    before = conversation_keys(called("{}")[:1], "mine", ids=False)[-1]
    assert key_with_answer(before, "", [("1", "look", "{}")], ids=False) == name(called(" { } "), "mine")
    echo = [*called("{}")[:1], {"role": "assistant", "content": "Yes. "}]
    assert key_with_answer(before, "\nYes.", [], ids=False) == name(echo, "mine")


def test_thinking_is_found_in_its_own_key_and_in_front_of_the_content() -> None:
    assert reasoning_of({"reasoning_content": " Hm.\n", "content": "Yes"}) == "Hm."
    assert reasoning_of({"content": "<think>\nHm.\n</think>\n\nYes"}) == "Hm."
    assert reasoning_of({"content": "Yes <think>Hm.</think>"}) is None
    assert reasoning_of({"content": None}) is None
    assert reasoning_of({"content": "Yes", "reasoning_content": ""}) == ""
    inline = [*called("{}")[:1], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes"}]
    assert name(inline) == name([*called("{}")[:1], {"role": "assistant", "content": "Yes"}])
