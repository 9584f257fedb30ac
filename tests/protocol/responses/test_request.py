"""What a responses body becomes, what its answer looks like, and that OpenAI's own types agree."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses import response_create_params as sdk
from pydantic import TypeAdapter

from ingot.engine.request import (
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    FinishReason,
    SequenceEnded,
    TextDelta,
    ThinkingDelta,
    Timing,
    Usage,
)
from ingot.errors import BadRequest, Cancelled, DeadlineExceeded, Overloaded, UnknownField, Unsupported
from ingot.protocol.chat.ask import CustomInputDecoder
from ingot.protocol.responses.request import (
    PreviousResponseNotFound,
    ResponseContext,
    ResponsePlan,
    ResponsesBody,
    read_response,
)
from ingot.protocol.responses.stored_response import StoredResponse
from ingot.protocol.responses.tools import RemoteMcpTool
from ingot.protocol.served import ServedModel, ThinkingSeal
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests import scripted
from tests.http.scripted import CARD, info, settings

ID = "resp_" + "0" * 24
SEAL = ThinkingSeal.of(b"secret", "")
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch"}
SPACE = {"type": "namespace", "name": "agents", "description": "d", "tools": [LOOK]}
REMOTE = {"files": (RemoteMcpTool("read", "Reads.", {"type": "object"}),)}
MCP = {"type": "mcp", "server_label": "files", "require_approval": "never"}
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Shelf:
    def __init__(self, **kept: StoredResponse) -> None:
        self.kept = kept

    def find(self, response_id: str) -> StoredResponse | None:
        return self.kept.get(response_id)

    def check(self) -> None:
        pass


@cache
def tokenizer() -> Tokenizer:
    return scripted.tokenizer()


@cache
def served(strict: bool = False) -> ServedModel:
    made = ServedModel.of(dataclasses.replace(CARD, vocab=scripted.VOCAB), tokenizer(), settings(strict=strict))
    return dataclasses.replace(made, secret=lambda: b"secret")


def read(*, past: Any = Shelf(), strict: bool = False, **body: Any) -> ResponsePlan:  # noqa: B008  (never changed)
    given = {"input": "Hi", **body}
    value = {name: blocked for name, blocked in given.items() if blocked is not ...}
    return read_response(value, served(strict=strict), ID, ResponseContext(past, REMOTE))


def prompt(**body: Any) -> str:
    return tokenizer().decode(read(**body).first.request.prompts[0], skip_special=False)


def ended(reason: FinishReason = "stop", completion: int = 5, thought: int = 0) -> list[Event]:
    usage = Usage(10, completion, 4, thought)
    return [SequenceEnded(0, reason, None, completion), Ended(usage, Timing(0.1, 0.2, 0.3))]


def result(plan: ResponsePlan, events: Iterable[Event]) -> list[dict[str, Any]]:
    """The wire's events of one round, each of a type that OpenAI's client knows."""
    builder = plan.builder
    chunks = [*builder.opening(), *(chunk for event in events for chunk in builder.chunks(event)), *builder.close()]
    made = [json.loads(msgspec.json.encode(chunk)) for chunk in chunks]
    assert [one["sequence_number"] for one in made] == list(range(len(made)))
    for one in made:
        STREAM_EVENT.validate_python(one)
    return made


def types(events: list[dict[str, Any]]) -> list[str]:
    return [one["type"].removeprefix("response.") for one in events]


def call(number: int, name: str, *fragments: str, complete: bool = True) -> list[Event]:
    began = CallBegan(0, number, f"call_{number}", name)
    return [began, *(CallArguments(0, number, one) for one in fragments), CallEnded(0, number, complete)]


# What is asked


def test_every_field_of_the_official_schema_is_known() -> None:
    official = set(sdk.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert official <= {field.name for field in dataclasses.fields(ResponsesBody)}


def test_instructions_come_first_and_developers_speak_as_the_template_has_it() -> None:
    items = [{"role": "developer", "content": "Kindly."}, {"role": "user", "content": "Hi"}]
    said = prompt(instructions="Briefly.", input=items)
    assert said.startswith("<|im_start|>system\nBriefly.")
    assert said.index("Briefly.") < said.index("Kindly.") < said.index("Hi")


def test_a_text_is_a_users_message() -> None:
    assert prompt(input="Hi") == prompt(input=[{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conversation", "conv_1"),
        ("prompt", {"id": "p"}),
        ("truncation", "auto"),
        ("n", 2),
        ("context_management", [{"type": "compaction"}]),
        ("service_tier", "flex"),
        ("moderation", {"model": "m"}),
        ("reasoning", {"summary": "concise"}),
        ("reasoning", {"mode": "pro"}),
        ("stream_options", {"include_obfuscation": True}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(Unsupported) as refused:
        read(**{field: value})
    assert refused.value.param is not None and refused.value.param.startswith(field)


@pytest.mark.parametrize(
    "harmless",
    [
        {"truncation": "disabled"},
        {"n": 1},
        {"context_management": []},
        {"text": {"verbosity": "medium"}},
        {"reasoning": {"mode": "standard", "context": "auto"}},
        {"stream_options": {"include_obfuscation": False}},
        {"client_metadata": {"session_id": "x"}},
        {"include": ["code_interpreter_call.outputs"]},
        {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "service_tier": "auto"},
    ],
)
def test_what_asks_for_nothing_is_taken(harmless: dict[str, Any]) -> None:
    assert read(**harmless).first.head is not None


def test_something_must_be_asked() -> None:
    for nothing in (..., []):
        with pytest.raises(BadRequest) as refused:
            read(input=nothing)
        assert refused.value.param == "input"


def test_a_near_miss_is_told_the_right_name() -> None:
    with pytest.raises(UnknownField, match="max_output_tokens"):
        read(max_output_token=5)


def test_web_search_is_named_in_the_receipt_and_refused_where_the_server_is_strict() -> None:
    plan = read(tools=[{"type": "web_search", "external_web_access": False}])
    receipt = result(plan, [TextDelta(0, "x"), *ended()])[-1]["response"]["ingot"]
    assert receipt["ignored"] == ["tools.web_search"]
    with pytest.raises(Unsupported, match="web_search"):
        read(strict=True, tools=[{"type": "web_search"}])


def test_a_hint_that_no_model_takes_is_named_in_the_receipt_and_refused_where_the_server_is_strict() -> None:
    head = read(text={"verbosity": "low"}).builder.head
    assert head.ignored == ["text.verbosity"]
    with pytest.raises(Unsupported, match="verbosity"):
        read(strict=True, text={"verbosity": "low"})


def test_logprobs_are_asked_for_in_either_way() -> None:
    assert read().first.request.sampling.logprobs is None
    assert read(include=["message.output_text.logprobs"]).first.request.sampling.logprobs == 0
    assert read(top_logprobs=3).first.request.sampling.logprobs == 3


def test_the_request_carries_what_the_body_says() -> None:
    made = read(max_output_tokens=7, temperature=0.5, seed=3, stop="x", cache="off", cache_salt="s").first.request
    assert (made.id, made.max_tokens, made.sampling.temperature, made.sampling.seed) == (ID, 7, 0.5, 3)
    assert (made.stop.strings, made.cache, made.salt) == (("x",), False, "s")
    exact = read(cache="exact").first.request
    assert (exact.cache, exact.exact) == (True, True)


# What went before


def stored(status: str = "completed") -> StoredResponse:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"type": "message", "id": f"msg_{'0' * 24}_1", "role": "assistant", "content": "Hello."}
    query = {"type": "message", "id": f"msg_{'0' * 24}_in0", "role": "user", "content": "Hi"}
    return StoredResponse({"id": ID, "status": status, "output": [thought, said]}, [query])


def test_a_response_is_gone_on_from_with_all_that_was_said() -> None:
    plan = read(past=Shelf(resp_1=stored()), previous_response_id="resp_1", input="And now?")
    assert [item["type"] for item in plan.items] == ["message", "reasoning", "message", "message"]
    said = prompt(past=Shelf(resp_1=stored()), previous_response_id="resp_1", input="And now?")
    assert said.endswith("Hello.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")


def test_instructions_are_not_carried_over() -> None:
    shelf = Shelf(resp_1=stored())
    assert "Briefly" in prompt(past=shelf, previous_response_id="resp_1", instructions="Briefly.")
    assert "Briefly" not in prompt(past=shelf, previous_response_id="resp_1")


def test_a_response_that_is_not_stored_cannot_be_gone_on_from() -> None:
    for past in (Shelf(), None):
        with pytest.raises(PreviousResponseNotFound) as refused:
            read(past=past, previous_response_id="resp_2")
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(BadRequest, match="not ended"):
        read(past=Shelf(resp_1=stored("in_progress")), previous_response_id="resp_1")


def test_a_reference_stands_for_the_stored_item() -> None:
    shelf = Shelf(**{ID: stored()})
    items = [{"type": "item_reference", "id": f"msg_{'0' * 24}_1"}, {"role": "user", "content": "Again."}]
    assert "Hello." in prompt(past=shelf, input=items)
    assert "Hello." in prompt(past=shelf, input=[{"id": f"msg_{'0' * 24}_1"}])
    for unknown in ("msg_1", f"msg_{'1' * 24}_1", f"msg_{'0' * 24}_7"):
        with pytest.raises(BadRequest, match="no stored item"):
            read(past=shelf, input=[{"type": "item_reference", "id": unknown}])


def test_where_nothing_is_stored_storing_is_refused_and_otherwise_left_undone() -> None:
    assert not read(past=None).store
    assert read().store
    assert not read(store=False).store
    for field in ("store", "background"):
        with pytest.raises(Unsupported) as refused:
            read(past=None, **{field: True})
        assert refused.value.param == field
    with pytest.raises(BadRequest, match="background"):
        read(background=True, store=False)


def test_items_are_kept_with_types_ids_and_parts() -> None:
    items = read(input=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]).items
    assert [item["id"] for item in items] == [f"msg_{'0' * 24}_in0", f"msg_{'0' * 24}_in1"]
    assert [item["content"][0]["type"] for item in items] == ["input_text", "output_text"]
    assert read(input=[{"role": "user", "content": "Hi", "id": "mine"}]).items[0]["id"] == "mine"


# What is answered


def test_a_text_is_told_from_beginning_to_end() -> None:
    events = result(read(), [TextDelta(0, "Hel"), TextDelta(0, "lo"), *ended()])
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    last = events[-1]["response"]
    assert Response.model_validate(last).output_text == "Hello"
    assert last["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []


def test_thinking_is_told_as_content_or_where_it_was_asked_for_as_summary() -> None:
    script = [ThinkingDelta(0, "H"), ThinkingDelta(0, "m."), TextDelta(0, "Yes"), *ended(thought=2)]
    plain = result(read(), script)
    assert types(plain)[2:8] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
    ]
    item = plain[-1]["response"]["output"][0]
    assert (item["summary"], item["content"]) == ([], [{"type": "reasoning_text", "text": "Hm."}])
    assert "encrypted_content" not in item
    assert plain[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == 2

    summed = result(read(reasoning={"summary": "auto"}), script)
    assert types(summed)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    item = summed[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "Hm."}] and "content" not in item


def test_thinking_that_was_sealed_elsewhere_is_left_out_and_named() -> None:
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB-somebody-elses"}
    said = {"role": "assistant", "content": "Hello"}
    items = [{"role": "user", "content": "Hi"}, foreign, said, foreign, {"role": "user", "content": "So?"}]
    assert prompt(input=items) == prompt(input=[item for item in items if item is not foreign])
    assert read(input=items).builder.head.ignored == ["input.*.encrypted_content"]


def test_sealed_thinking_comes_back_into_the_prompt() -> None:
    plan = read(include=["reasoning.encrypted_content"])
    events = result(plan, [ThinkingDelta(0, "Hm."), TextDelta(0, "Yes"), *ended()])
    thought, said = events[-1]["response"]["output"]
    assert SEAL.open(thought["encrypted_content"]) == "Hm."
    only_sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    again = prompt(input=[{"role": "user", "content": "Hi"}, only_sealed, said, {"role": "user", "content": "So?"}])
    assert "<think>\nHm.\n</think>\n\nYes<|im_end|>" in again


def test_a_call_is_told_from_beginning_to_end() -> None:
    script = [TextDelta(0, "I look."), *call(0, "look", '{"x"', ":1}"), *ended("tool_calls")]
    events = result(read(tools=[LOOK]), script)
    assert types(events)[7:] == [
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    item = events[-1]["response"]["output"][1]
    assert (item["name"], item["arguments"], item["call_id"], item["status"]) == (
        "look",
        '{"x":1}',
        "call_0",
        "completed",
    )


def test_a_call_of_a_namespaces_tool_names_both() -> None:
    item = result(read(tools=[SPACE]), [*call(0, "agents__look", "{}"), *ended()])[-1]["response"]["output"][0]
    assert (item["name"], item["namespace"]) == ("look", "agents")


def test_a_custom_tools_text_is_told_as_it_comes() -> None:
    events = result(read(tools=[PATCH]), [*call(0, "patch", '{"inp', 'ut": "a\\', 'nb"', "}"), *ended("tool_calls")])
    assert types(events)[2:7] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert [one["delta"] for one in events[3:5]] == ["a", "\nb"]
    assert events[-1]["response"]["output"][0]["input"] == "a\nb"


@given(st.text(), st.data(), st.booleans())
def test_a_custom_tools_text_is_the_same_however_it_was_cut(text: str, data: st.DataObject, ascii: bool) -> None:
    raw = json.dumps({"input": text}, ensure_ascii=ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    argument = CustomInputDecoder()
    pieces = [argument.push(raw[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert "".join([*pieces, argument.finish()]) == text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ('{"x": 1, "input": "late"}', "late"),
        ('{"text": "other"}', '{"text": "other"}'),
        ('{"input": 3}', '{"input": 3}'),
        ('{"inp', '{"inp'),
        ('{"input": "cut sh', "cut sh"),
        ("", ""),
    ],
)
def test_arguments_of_another_form_are_given_as_they_are(raw: str, text: str) -> None:
    argument = CustomInputDecoder()
    assert argument.push(raw) + argument.finish() == text


def test_an_answer_that_came_to_its_limit_is_incomplete() -> None:
    events = result(read(max_output_tokens=5), [TextDelta(0, "Hel"), *ended("length")])
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (last["response"]["status"], last["response"]["output"][0]["status"]) == ("incomplete", "incomplete")


def test_a_call_that_was_cut_short_is_incomplete() -> None:
    events = result(read(tools=[LOOK]), [*call(0, "look", '{"x', complete=False), *ended("length")])
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_logprobs_go_with_the_text_that_they_are_of() -> None:
    script = [
        TextDelta(0, "", (info("<"),)),
        ThinkingDelta(0, "Hm."),
        TextDelta(0, "", (info("Y"),)),
        TextDelta(0, "Yes", (info("es", top=[("x", -2.0)]),)),
        *ended(),
    ]
    events = result(read(top_logprobs=1), script)
    delta = next(one for one in events if one["type"] == "response.output_text.delta")
    assert [entry["token"] for entry in delta["logprobs"]] == ["Y", "es"]
    part = events[-1]["response"]["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["Y", "es"]
    assert Response.model_validate(events[-1]["response"]).output[1].content[0].logprobs is not None  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DeadlineExceeded("Too late."), "failed", "server_error"),
        (Overloaded("Full."), "failed", "rate_limit_exceeded"),
        (Cancelled("Stopped."), "cancelled", "server_error"),
    ],
)
def test_a_response_that_broke_says_why_and_keeps_what_was_written(error: Any, status: str, code: str) -> None:
    builder = read().builder
    builder.opening()
    builder.chunks(TextDelta(0, "Hel"))
    last = json.loads(msgspec.json.encode(builder.failed(error)[-1]))
    STREAM_EVENT.validate_python(last)
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]["code"]) == (status, code)
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"


def test_what_was_asked_is_given_back() -> None:
    body = {
        "instructions": "Briefly.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 7,
        "max_tool_calls": 3,
        "tools": [LOOK],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
        "text": {"format": {"type": "text"}},
    }
    made = result(read(**body), [TextDelta(0, "x"), *ended()])[-1]["response"]
    for name, value in body.items():
        assert made[name] == value, name
    Response.model_validate(made)


def test_the_servers_own_calls_are_listed_made_and_gone_on_from() -> None:
    plan = read(tools=[MCP])
    builder = plan.builder
    opening = [json.loads(msgspec.json.encode(chunk)) for chunk in builder.opening()]
    assert types(opening)[2:] == [
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
    ]
    script = [*call(0, "files__read", '{"path": "a"}'), *call(1, "files__read", "{}"), *ended("tool_calls")]
    events = [chunk for event in script for chunk in builder.chunks(event)]
    first, second = builder.calls
    events += [*first.succeeded("text of a"), *second.failed("no such file")]
    for chunk in events:
        STREAM_EVENT.validate_python(json.loads(msgspec.json.encode(chunk)))
    job = plan.next_task()
    assert job is not None and job.request.id == ID
    said = tokenizer().decode(job.request.prompts[0], skip_special=False)
    assert said.index("files__read") < said.index("text of a") < said.index("no such file")
    builder.calls = []
    builder.chunks(TextDelta(0, "Done."))
    for event in ended():
        builder.chunks(event)
    made = json.loads(msgspec.json.encode(builder.close()[-1]))["response"]
    assert [item["type"] for item in made["output"]] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert [item.get("status") for item in made["output"][1:]] == ["completed", "failed", "completed"]
    assert made["usage"]["output_tokens"] == 10
    Response.model_validate(made)


def test_no_round_begins_without_tokens_left_to_spend() -> None:
    plan = read(tools=[MCP], max_output_tokens=5)
    for event in [*call(0, "files__read", "{}"), *ended("tool_calls", completion=5)]:
        plan.builder.chunks(event)
    assert plan.next_task() is None
