"""A model that learned to call tools, asked through the official client, as an agent would ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from foundry.lesson import Lesson, seeded
from foundry.tool_lessons import tool_lesson
from ingot.engine.loading.language_model import start_engine
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests.http.running import running
from tests.http.scripted import settings

MODELS = Path(__file__).parents[3] / "foundry" / "models"
QUESTIONS = 4
RIGHT = 3  # at least; the models' cards say how often they are
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[pytest.param("hybrid", marks=pytest.mark.slow), "dense"])
def client(request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    engine = start_engine(settings(), MODELS / request.param, name=request.param, source="foundry")
    try:
        with running(engine, settings()) as url, OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as made:
            yield made
    finally:
        engine.close()


def lessons() -> list[Lesson]:
    """Held-out questions that need calls, each as a first message."""
    found: list[Lesson] = []
    seed = 0
    while len(found) < QUESTIONS:
        lesson = tool_lesson(seeded(seed, held_out=True))
        seed += 1
        if lesson.kind == "tool" and len(lesson.messages) == 1:
            found.append(lesson)
    return found


def asked(lesson: Lesson, **more: Any) -> dict[str, Any]:
    thinks = {"enable_thinking": lesson.thinking is not None}
    return {
        "model": "default",
        "messages": lesson.messages,
        "tools": lesson.tools,
        "temperature": 0,
        "max_tokens": 200,
        "extra_body": thinks,
        **more,
    }


def streamed(client: OpenAI, lesson: Lesson) -> tuple[list[tuple[str, Any]], str | None]:
    names: list[str] = []
    arguments: list[str] = []
    reason = None
    for chunk in client.chat.completions.create(**asked(lesson), stream=True):
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                names.append(call.function.name)
                arguments.append("")
            arguments[call.index] += call.function.arguments or ""
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)], reason


def test_the_right_tools_are_called_streamed_and_not(client: OpenAI) -> None:
    right = 0
    for lesson in lessons():
        answer = client.chat.completions.create(**asked(lesson)).choices[0]
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls or ()]
        assert streamed(client, lesson) == (calls, answer.finish_reason)
        right += calls == [(call.name, call.arguments) for call in lesson.calls]
    assert right >= RIGHT


def test_a_named_tool_is_called_whatever_was_asked(client: OpenAI) -> None:
    for lesson in lessons()[:4]:
        assert lesson.tools is not None
        for tool in lesson.tools[:2]:
            function = tool["function"]
            choice = {"type": "function", "function": {"name": function["name"]}}
            answer = client.chat.completions.create(**asked(lesson, tool_choice=choice))
            assert answer.choices[0].finish_reason in ("tool_calls", "length")
            for call in answer.choices[0].message.tool_calls or ():
                assert call.function.name == function["name"]
                if answer.choices[0].finish_reason == "tool_calls":
                    assert set(json.loads(call.function.arguments)) <= set(function["parameters"]["properties"])


def test_a_model_that_breaks_lines_wherever_it_may_comes_to_an_end_behind_its_calls(client: OpenAI) -> None:
    [model] = client.models.list().data
    tokenizer = Tokenizer.load(MODELS / model.id)
    [newline] = tokenizer.encode("\n", add_special=False)
    would_rather = {str(newline): 100} | {str(end): 50 for end in tokenizer.eos_ids}
    clock = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA, "strict": True}}
    way = {"tools": [clock], "tool_choice": "required", "extra_body": {"enable_thinking": False}}
    answer = client.chat.completions.create(**asked(lessons()[0], logit_bias=would_rather, **way)).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert len(answer.message.tool_calls or ()) == 1 and not answer.message.content


def test_a_forced_call_that_is_cut_is_never_content(client: OpenAI) -> None:
    for most in (1, 3, 6, 10, 20):
        asking = asked(lessons()[0], tool_choice="required", max_tokens=most)
        answer = client.chat.completions.create(**asking).choices[0]
        assert answer.finish_reason == "length" and not answer.message.content


def test_the_model_s_own_file_says_how_tokens_are_chosen(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert model.model_dump()["default_sampling_params"] == {"temperature": 0.0}


def test_without_a_choice_no_tool_is_called(client: OpenAI) -> None:
    answer = client.chat.completions.create(**asked(lessons()[0], tool_choice="none"))
    assert answer.choices[0].message.tool_calls is None


def test_tools_and_a_form_of_the_answer_go_together(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    called = client.chat.completions.create(**asked(lessons()[0], response_format=form)).choices[0]
    if not called.message.tool_calls:
        assert set(json.loads(called.message.content or "")) == {"city", "warm"}
    told = client.chat.completions.create(**asked(lessons()[0], response_format=form, tool_choice="none")).choices[0]
    assert told.finish_reason == "stop"
    assert set(json.loads(told.message.content or "")) == {"city", "warm"}


def test_a_spent_budget_closes_the_thinking_and_the_answer_goes_on(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is 57 + 66?"}],
        temperature=0,
        max_tokens=100,
        extra_body={"enable_thinking": True, "thinking_budget": 5},
    )
    message = answer.choices[0].message
    assert message.content and message.model_dump()["reasoning_content"]
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 5 + 8  # the closing tag counts too


WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": SCHEMA},
}


def hot_calls(client: OpenAI, seeds: range, **more: Any) -> list[tuple[str, str]]:
    """The calls of answers at a temperature at which the model writes nonsense, streamed, several choices at a time."""
    found = []
    for seed in seeds:
        calls: dict[tuple[int, int], list[str]] = {}
        stream = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
            tools=[WEATHER],
            temperature=1.4,
            seed=seed,
            n=4,
            max_tokens=120,
            stream=True,
            extra_body={"enable_thinking": False, **more},
        )
        for chunk in stream:
            for choice in chunk.choices:
                assert choice.finish_reason != "length"
                for call in choice.delta.tool_calls or ():
                    said = calls.setdefault((choice.index, call.index), ["", ""])
                    said[0] += call.function.name or ""
                    said[1] += call.function.arguments or ""
        found += [(name, arguments) for name, arguments in calls.values()]
    return found


def fits(name: str, arguments: str) -> bool:
    try:
        jsonschema.validate(json.loads(arguments), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return name == "get_weather"


def test_calls_that_the_model_begins_by_itself_fit_their_schemas_however_hot_it_is(client: OpenAI) -> None:
    calls = hot_calls(client, range(3))
    assert calls and all(fits(*call) for call in calls), calls


def test_a_request_can_have_its_calls_not_held(client: OpenAI) -> None:
    calls = hot_calls(client, range(3), hold_calls=False)
    assert not all(fits(*call) for call in calls)
