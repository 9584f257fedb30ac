"""Items become the conversation that a chat would have been, and sealed thinking comes back word for word."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadRequest, Unsupported
from ingot.protocol.responses.input_items import HOSTED_ITEMS, INPUT_ITEMS, InputConversation
from ingot.protocol.schema.fields import BodyReading
from ingot.protocol.served import ThinkingSeal
from ingot.protocol.terms import Terms

SEAL = ThinkingSeal.of(b"a secret", "tenant")
TERMS = Terms(("toy",), 300, 60.0)


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    conversation = InputConversation(SEAL)
    for at, item in enumerate(INPUT_ITEMS.parse(list(items), "input", BodyReading(TERMS))):
        conversation.add(item, f"input.{at}")
    return conversation.finish()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def output_message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1", "content": [part]}


def function_call(call_id: str, name: str = "look", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def function_output(call_id: str, output: Any = "seen") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def reasoning(**given: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **given}


def called(call_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_messages_of_every_role_keep_their_order_and_their_words() -> None:
    said = messages(
        {"role": "system", "content": "Be brief."},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "And kind."}]},
        user("Hi"),
        output_message("Hello"),
        user("Bye"),
    )
    assert [(one["role"], one["content"]) for one in said] == [
        ("system", "Be brief."),
        ("developer", "And kind."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Bye"),
    ]


def test_thinking_text_and_calls_of_one_answer_are_one_message() -> None:
    thought = reasoning(content=[{"type": "reasoning_text", "text": "Hm."}])
    said = messages(
        user("Hi"),
        thought,
        output_message("Let me look."),
        function_call("c1"),
        function_call("c2"),
        function_output("c1"),
        function_output("c2", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
        output_message("There."),
    )
    assert said[1] == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "Hm.",
        "tool_calls": [called("c1", "look"), called("c2", "look")],
    }
    assert said[2] == {"role": "tool", "tool_call_id": "c1", "content": "seen", "name": "look"}
    assert said[3]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert said[4] == {"role": "assistant", "content": "There."}


def test_an_answer_that_is_nothing_but_calls_has_no_content() -> None:
    assert messages(user("Hi"), function_call("c1"))[1]["content"] is None


def test_two_messages_in_a_row_are_two_turns_and_thinking_begins_another() -> None:
    said = messages(output_message("one"), output_message("two"), reasoning(summary=[summary("Hm.")]))
    assert [one.get("content") for one in said] == ["one", "two", None]
    assert said[2]["reasoning_content"] == "Hm."


def summary(text: str) -> dict[str, str]:
    return {"type": "summary_text", "text": text}


def test_text_after_a_call_belongs_to_the_same_answer() -> None:
    said = messages(output_message("one"), function_call("c1"), output_message(" two"))
    assert (len(said), said[0]["content"]) == (1, "one two")


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    said = messages(
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'say "hi"\n', "namespace": "git"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    )
    assert said[0]["tool_calls"] == [called("c1", "git__patch", '{"input": "say \\"hi\\"\\n"}')]
    assert said[1]["content"] == "done"


def test_a_tool_of_a_namespace_goes_by_both_names() -> None:
    said = messages(function_call("c1", "close", namespace="agents"), function_output("c1"))
    assert said[0]["tool_calls"][0]["function"]["name"] == said[1]["name"] == "agents__close"


def test_the_servers_own_calls_come_before_all_their_results() -> None:
    def mcp(number: int, **result: Any) -> dict[str, Any]:
        return {
            "type": "mcp_call",
            "id": f"mcp_{number}",
            "call_id": f"c{number}",
            "server_label": "files",
            "name": "read",
            "arguments": "{}",
            **result,
        }

    broken = {"type": "mcp_tool_execution_error", "content": "no such file"}
    listing = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "files", "tools": []}
    said = messages(user("Hi"), listing, mcp(1, output="text"), mcp(2, error=broken), output_message("Done."))
    assert [one["role"] for one in said] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [call["function"]["name"] for call in said[1]["tool_calls"]] == ["files__read"] * 2
    assert [one["content"] for one in said[2:4]] == ["text", "no such file"]


def test_sealed_thinking_counts_before_what_stands_next_to_it() -> None:
    sealed = SEAL.close("the very words")
    said = messages(reasoning(summary=[summary("something else")], encrypted_content=sealed))
    assert said[0]["reasoning_content"] == "the very words"


@given(st.text())
def test_what_was_sealed_is_read_back_word_for_word(text: str) -> None:
    assert SEAL.open(SEAL.close(text)) == text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "gAAAAAB-somebody-elses",
        "ingot1.",
        "ingot1.AAAA",
        "ingot1.\u00e9",
        SEAL.close("x")[:-4],
        SEAL.close("x")[7:],
    ],
)
def test_what_this_server_did_not_seal_cannot_be_read(content: str) -> None:
    assert SEAL.open(content) is None


def test_one_tenants_thinking_is_no_other_tenants() -> None:
    assert ThinkingSeal.of(b"a secret", "other").open(SEAL.close("x")) is None
    assert ThinkingSeal.of(b"another secret", "tenant").open(SEAL.close("x")) is None


def test_thinking_that_was_sealed_elsewhere_is_left_out_with_all_that_stands_next_to_it() -> None:
    foreign = reasoning(summary=[summary("Hm.")], encrypted_content="gAAAAAB-somebody-elses")
    [_, answer] = messages(user("Hi"), foreign, output_message("Hello"))
    assert answer == {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize("kind", ["input_image", "input_video", "input_file", "input_audio"])
def test_media_are_refused_by_name(kind: str) -> None:
    with pytest.raises(Unsupported, match=kind):
        messages({"role": "user", "content": [{"type": kind, "image_url": "data:"}]})


@pytest.mark.parametrize("kind", HOSTED_ITEMS)
def test_items_of_tools_that_are_not_here_are_refused_by_name(kind: str) -> None:
    with pytest.raises(Unsupported, match=kind):
        messages({"type": kind})


@pytest.mark.parametrize("item", [{"type": "letter"}, {"role": "robot", "content": "x"}, {}, {"type": "message"}])
def test_what_is_no_item_is_refused(item: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        messages(item)
