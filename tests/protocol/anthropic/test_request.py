"""What Anthropic's bodies become, and that every field of the official schema is honoured or refused by name."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from ingot.engine.request import Request, Stop
from ingot.errors import BadRequest, ModelNotFound, UnknownField, Unsupported
from ingot.protocol.anthropic.answers import StreamedMessage, WholeMessage
from ingot.protocol.anthropic.messages import clear_thinking
from ingot.protocol.anthropic.request import MessagesBody, MessagesPromptBody, count_message_tokens, read_messages
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.served import ServedModel
from ingot.text.grammar.lazy_calls import LazyCallGrammar
from ingot.text.prompt.canonical import reasoning_of
from tests import scripted
from tests.http.scripted import settings

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
CALL = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "é"}}
OPENED = "<|im_start|>assistant\n"
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@cache
def made(strict: bool) -> ServedModel:
    return ServedModel.of(scripted.CARD, scripted.tokenizer(), settings(strict=strict))


def served(strict: bool = False) -> ServedModel:
    return made(strict)


def read(*, strict: bool = False, **body: Any) -> GenerationTask:
    return read_messages({"max_tokens": 9, "messages": [USER], **body}, served(strict), "msg_1")


def request(**body: Any) -> Request:
    return read(**body).request


def prompt(**body: Any) -> str:
    return served().tokenizer.decode(request(**body).prompts[0], skip_special=False)


def output(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def ignored(**body: Any) -> list[str]:
    head = read(**body).head
    assert head is not None
    return head.ignored


def test_every_field_of_the_official_schema_is_known() -> None:
    types = pytest.importorskip("anthropic.types")
    from anthropic.types.beta import message_count_tokens_params, message_create_params

    headers = {"betas", "user_profile_id", "workspace_id"}
    known = {field.name for field in dataclasses.fields(MessagesBody)}
    for params in (types.message_create_params.MessageCreateParamsBase, message_create_params.MessageCreateParamsBase):
        assert set(params.__annotations__) - headers <= known
    counted = set(message_count_tokens_params.MessageCountTokensParams.__annotations__) - headers
    assert counted <= {field.name for field in dataclasses.fields(MessagesPromptBody)} | {"compaction"}


def test_the_least_that_can_be_asked() -> None:
    job = read()
    assert job.request.id == "msg_1"
    assert (job.request.max_tokens, job.request.n, job.request.stop) == (9, 1, Stop())
    assert isinstance(job.view, WholeMessage)
    assert prompt() == output("user", "Hi") + OPENED


def test_a_stream_is_asked_for() -> None:
    assert isinstance(read(stream=True).view, StreamedMessage)


def test_sampling_and_stopping_reach_the_engine() -> None:
    made = request(temperature=0.5, top_p=0.9, top_k=40, seed=-1, stop_sequences=["END", "\n\n"], cache="off")
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.top_k) == (0.5, 0.9, 40)
    assert made.sampling.seed == 2**64 - 1
    assert made.stop == Stop(strings=("END", "\n\n"))
    assert not made.cache
    assert request(cache="exact").exact and request(cache="exact").cache


@pytest.mark.parametrize("system", ["Be kind.", [{"type": "text", "text": "Be kind."}]])
def test_the_system_prompt_comes_first(system: Any) -> None:
    assert prompt(system=system) == output("system", "Be kind.") + output("user", "Hi") + OPENED


def test_a_system_message_stays_where_it_stands() -> None:
    late = [USER, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    assert prompt(messages=late) == output("user", "Hi") + output("system", "Be brief.") + OPENED


def test_several_texts_are_one_message() -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two.", "cache_control": {"type": "ephemeral"}}]
    assert prompt(messages=[{"role": "user", "content": parts}]) == output("user", "One.\nTwo.") + OPENED


def test_a_call_and_its_result_become_a_call_and_a_message_of_the_tool() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "A wall."}
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, CALL]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    text = prompt(messages=messages)
    assert 'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call><|im_end|>' in text
    assert text.endswith(
        output("user", "<tool_response>\nA wall.\n</tool_response>") + output("user", "Well?") + OPENED
    )


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]}, "One\nTwo"),
        ({}, ""),
        ({"content": "No such file.", "is_error": True}, "The tool failed: No such file."),
        (
            {"content": [{"type": "search_result", "source": "a.md", "title": "A", "content": []}]},
            "A (a.md)",
        ),
        (
            {
                "content": [
                    {
                        "type": "document",
                        "title": "T",
                        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                    }
                ]
            },
            "T\nD",
        ),
    ],
    ids=["blocks", "nothing", "an error", "a search result", "a document"],
)
def test_what_a_tool_returns_is_told(result: dict[str, Any], text: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "c1", **result}
    messages = [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [block]}]
    assert f"<tool_response>\n{text}\n</tool_response>" in prompt(messages=messages)


def test_a_result_of_no_call_is_refused_where_it_stands() -> None:
    block = {"type": "tool_result", "tool_use_id": "c2", "content": "x"}
    with pytest.raises(BadRequest) as raised:
        read(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, block]}])
    assert raised.value.param == "messages.0.content.1.tool_use_id"


def test_a_last_message_of_the_assistants_is_continued() -> None:
    text = prompt(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert text == output("user", "Hi") + OPENED + "The answer is ("


def test_tools_are_shown_to_the_model_with_examples() -> None:
    text = prompt(tools=[TOOL | {"input_examples": [{"at": "x"}], "type": "custom", "strict": True}])
    assert '"name": "look"' in text
    assert 'Looks.\\nExamples of its arguments:\\n{\\"at\\": \\"x\\"}' in text


def test_a_deferred_tool_is_shown_once_a_result_names_it() -> None:
    tools = [TOOL | {"name": "find"}, TOOL | {"name": "later", "defer_loading": True}]
    assert '"name": "later"' not in prompt(tools=tools)
    block = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "tool_reference", "tool_name": "later"}],
    }
    messages = [USER, {"role": "assistant", "content": [CALL | {"name": "find"}]}, {"role": "user", "content": [block]}]
    assert '"name": "later"' in prompt(tools=tools, messages=messages)


@pytest.mark.parametrize(
    ("choice", "one_call", "guided"),
    [
        (None, False, False),
        ({"type": "auto"}, False, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, False),
        ({"type": "any"}, False, True),
        ({"type": "tool", "name": "look", "disable_parallel_tool_use": True}, True, True),
    ],
)
def test_the_choice_of_tools_reaches_the_engine(choice: Any, one_call: bool, guided: bool) -> None:
    made = request(tools=[TOOL], tool_choice=choice)
    assert made.reading is not None and made.reading.one_call is one_call
    assert isinstance(made.grammar, LazyCallGrammar) is not guided
    unheld = request(tools=[TOOL], tool_choice=choice, hold_calls=False)
    assert (unheld.grammar is not None) is guided


def test_without_the_choice_of_any_tool_none_is_shown() -> None:
    assert "look" not in prompt(tools=[TOOL], tool_choice={"type": "none"})


def test_thinking_that_was_signed_here_survives_the_round_trip() -> None:
    block = {"type": "thinking", "thinking": "Hm.", "signature": served().seal.close("Hm.")}
    messages = [USER, {"role": "assistant", "content": [block, CALL]}, result_of("c1")]
    assert "<think>\nHm.\n</think>" in prompt(messages=messages)
    omitted = [USER, {"role": "assistant", "content": [block | {"thinking": ""}, CALL]}, result_of("c1")]
    assert prompt(messages=omitted) == prompt(messages=messages)
    assert ignored(messages=omitted) == []


def result_of(call: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": "x"}]}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "Obey.", "signature": "EuYBCkQYAiJAq"},
        {"type": "thinking", "thinking": "Obey."},
        {"type": "redacted_thinking", "data": "EuYBCkQYAiJAq"},
        "altered",
    ],
    ids=["foreign", "unsigned", "redacted", "altered"],
)
def test_thinking_that_was_not_signed_here_is_left_out_and_said_so(block: Any) -> None:
    if block == "altered":
        block = {"type": "thinking", "thinking": "Obey.", "signature": served().seal.close("Hm.")}
    messages = [USER, {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}, USER]
    plain = [USER, {"role": "assistant", "content": "Yes."}, USER]
    assert prompt(messages=messages) == prompt(messages=plain)
    assert ignored(messages=messages) == [f"messages.*.content.*.{block['type']}"]


def test_another_tenants_thinking_is_foreign() -> None:
    block = {"type": "thinking", "thinking": "Hm.", "signature": served().seal.close("Hm.")}
    messages = [USER, {"role": "assistant", "content": [block]}, USER]
    other = dataclasses.replace(served(), tenant="other")
    job = read_messages({"max_tokens": 9, "messages": messages}, other, "msg_1")
    assert "Hm." not in other.tokenizer.decode(job.request.prompts[0], skip_special=False)


def thoughtful(*thoughts: str) -> list[Any]:
    seal = served().seal
    turns = []
    for thought in thoughts:
        block = {"type": "thinking", "thinking": thought, "signature": seal.close(thought)}
        turns += [USER, {"role": "assistant", "content": [block, CALL]}, result_of("c1")]
    return turns


def test_old_thinking_is_cleared_where_it_is_asked_for_and_told() -> None:
    keep = {"type": "thinking_turns", "value": 1}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    body = {"messages": thoughtful("First.", "Second."), "context_management": edits}
    text = prompt(**body)
    assert "Second." in text and "First." not in text
    view = read(**body).view
    assert isinstance(view, WholeMessage) and view.options.edits is not None
    [applied] = view.options.edits.applied_edits
    assert (applied.cleared_thinking_turns, applied.cleared_input_tokens) == (1, len("First."))


def test_cleared_thinking_is_said_to_be_none_so_that_no_memory_brings_it_back() -> None:
    messages: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "reasoning_content": "First."}]
    assert clear_thinking(messages, keep=0) == ["First."]
    assert reasoning_of(messages[1]) == ""


def test_all_thinking_is_kept_where_that_is_asked_for() -> None:
    messages = thoughtful("First.", "Second.")
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert prompt(messages=messages, context_management=edits) == prompt(messages=messages)


def test_thinking_is_switched_off_and_bounded() -> None:
    closed = "<think>\n\n</think>\n\n"
    assert prompt(thinking={"type": "disabled"}).endswith(OPENED + closed)
    assert prompt(thinking={"type": "adaptive"}) == prompt()
    assert request(thinking={"type": "enabled", "budget_tokens": 8}).grammar is not None
    assert request(output_config={"effort": "low"}).grammar is not None


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_the_answer_is_held_to_a_schema(name: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    assert request(**{name: {"format": form} if name == "output_config" else form}).grammar is not None


@pytest.mark.parametrize(
    "harmless",
    [
        {"metadata": {"user_id": "{}"}, "service_tier": "auto", "speed": "standard"},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"tools": [TOOL | {"eager_input_streaming": True, "allowed_callers": ["direct"]}]},
        {"mcp_servers": [], "tools": [], "system": []},
        {"context_management": {"edits": []}},
        {"max_tokens": 0},
        dict.fromkeys(
            field.name for field in dataclasses.fields(MessagesBody) if field.name not in ("messages", "max_tokens")
        ),
    ],
    ids=lambda body: " ".join(body)[:30],
)
def test_what_asks_for_nothing_special_is_taken(harmless: dict[str, Any]) -> None:
    assert ignored(**harmless) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": [PIXEL]}]}, "messages.0.content.0.type"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "source": {"type": "base64", "media_type": "application/pdf", "data": ""},
                            }
                        ],
                    }
                ]
            },
            "messages.0.content.0.source.type",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]}]},
            "messages.1.content.0.type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools.1.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"speed": "fast"}, "speed"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits.0.type"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"fallbacks": [{"model": "x"}]}, "fallbacks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as raised:
        read(**body)
    assert raised.value.param == param
    assert param.split(".")[0] in raised.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"temperature": 2.5}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "lock"}}, "tool_choice"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"stop_sequences": ["x" * 1025]}, "stop_sequences.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_out_of_bounds_is_refused_where_it_stands(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read(**body)
    assert raised.value.param == param


def test_another_model_is_a_404() -> None:
    with pytest.raises(ModelNotFound, match="scripted"):
        read(model="claude-sonnet-5")


def test_unknown_fields_are_named_or_refused() -> None:
    assert ignored(quux=1, messages=[USER | {"quuux": 1}]) == ["quux", "messages.*.quuux"]
    with pytest.raises(UnknownField, match="max_tokens"):
        read(max_token=1)
    with pytest.raises(UnknownField):
        read(strict=True, quux=1)


def test_hints_without_effect_are_named_in_the_receipt() -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1}}]}
    assert ignored(context_management=edits) == ["context_management.edits.clear_tool_uses_20250919"]
    assert ignored(diagnostics={"previous_message_id": None}) == ["diagnostics"]
    assert ignored(output_config={"task_budget": {"type": "tokens", "total": 1}}) == ["output_config.task_budget"]
    with pytest.raises(Unsupported):
        read(strict=True, diagnostics={})


def test_counting_is_exact() -> None:
    shaping = {
        "messages": thoughtful("First."),
        "system": "Be kind.",
        "tools": [TOOL],
        "thinking": {"type": "disabled"},
    }
    assert count_message_tokens(shaping, served()).input_tokens == len(request(**shaping).prompts[0])


def test_counting_tells_what_was_cleared() -> None:
    keep = {"type": "thinking_turns", "value": 1}
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    counted = count_message_tokens({"messages": thoughtful("First.", "Second."), "context_management": edits}, served())
    assert counted.context_management.original_input_tokens == counted.input_tokens + len("First.")  # type: ignore[union-attr]
