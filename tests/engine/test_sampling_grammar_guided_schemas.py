"""A few hundred schemas with SmolLM2's vocabulary, through the engine: most on a model of no sense, some on SmolLM2."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bench import random_models
from ingot.config import DEFAULT_MODEL, Settings
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.request import Ended, Request, Sampling, SequenceEnded
from ingot.errors import BadRequest
from ingot.models.files.packaged import ensure_packaged_model
from ingot.models.files.progress import no_progress
from ingot.text.grammar.calls import CallChoice, ForcedCall, GrammarTool
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.parser.events import (
    ContentDelta,
    ToolCallArguments,
    ToolCallBegan,
    ToolSchema,
    call_id_maker,
    merge_events,
)
from ingot.text.parser.parser import Parser, ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.json_like import HERMES
from tests import engines
from tests.text.grammar.schemas import Schema, schemas

NUMBERS = itertools.count()
SETTINGS = Settings(memory="3GB", context=1024)
CONFIG = {
    "model_type": "llama",
    **random_models.SMALL,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 49152,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ensure_packaged_model(DEFAULT_MODEL, SETTINGS, no_progress))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer, tokenizer.vocab_size)
    yield made
    made.close()


@pytest.fixture(scope="module")
def senseless(tokenizer: Tokenizer) -> Iterator[Engine]:
    folder = engines.write_tiny("senseless", CONFIG, random_models.build(CONFIG, seed=1, spread=0.1))
    stated = Settings(context=1024, prefill_chunk=256)
    made = Engine(lambda: engines.load(stated, folder, tokenizer, name="senseless"), EngineLimits())
    yield made
    made.check()
    made.close()


@pytest.fixture(scope="module")
def smollm() -> Iterator[Engine]:
    made = start_engine(
        SETTINGS, ensure_packaged_model(DEFAULT_MODEL, SETTINGS, no_progress), name=DEFAULT_MODEL, source="packaged"
    )
    yield made
    made.check()
    made.close()


def check(text: str, schema: Schema) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(text))


def together(
    engine: Engine, prompts: Sequence[str], plans: Sequence[CompiledGrammar], samplings: Sequence[Sampling], most: int
) -> list[tuple[str, str]]:
    """Each one's text and why it ended, all in one batch."""
    streams = [
        engine.generate(
            Request(
                f"t{next(NUMBERS)}",
                (tuple(engine.tokenizer.encode(prompt, add_special=False)),),
                max_tokens=most,
                sampling=sampling,
                grammar=plan,
            )
        )
        for prompt, plan, sampling in zip(prompts, plans, samplings, strict=True)
    ]
    found = []
    for stream in streams:
        events = [event for batch in stream for event in batch]
        assert isinstance(events[-1], Ended), events[-1]
        [reason] = [event.reason for event in events if isinstance(event, SequenceEnded)]
        found.append((engines.text_of(events), reason))
    return found


@settings(max_examples=settings().max_examples // 8, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(schemas(), min_size=16, max_size=16), seed=st.integers(0, 100))
def test_whatever_a_model_without_sense_says_by_a_schema_is_valid(
    senseless: Engine, grammars: Grammars, tokenizer: Tokenizer, drawn: list[Schema], seed: int
) -> None:
    # It would never come to an end by itself: what closes strings and objects is made likelier.
    closing = [tokenizer.encode(text, add_special=False) for text in ('"', '",', '"}', "}", "]", '"]', "},", ",", "0")]
    sampling = Sampling(seed=seed, logit_bias=tuple((ids[0], 10.5) for ids in closing if len(ids) == 1))
    entries: list[tuple[Schema, CompiledGrammar]] = []
    for schema in drawn:
        try:
            entries.append((schema, grammars.json_schema(schema)))
        except BadRequest as error:
            assert "no value can satisfy it" in error.message
    count = len(entries)
    answers = together(senseless, ["Now:"] * count, [plan for _, plan in entries], [sampling] * count, 80)
    for (schema, _), (text, reason) in zip(entries, answers, strict=True):
        if reason == "stop":
            check(text, schema)
    assert sum(reason == "stop" for _, reason in answers) >= len(answers) // 4


def _object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 16}
ASKED: list[tuple[str, Schema]] = [
    ("Describe Paris.", _object(city=SHORT, country=SHORT, capital={"type": "boolean"})),
    ("How old is the Eiffel Tower?", _object(years={"type": "integer", "minimum": 0, "maximum": 5000})),
    (
        "Name three colours.",
        {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 3},
    ),
    ("When did the war end?", _object(date={"type": "string", "format": "date"})),
    ("Is water wet?", {"enum": ["yes", "no", "it depends"]}),
    ("Give me a number.", {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}),
    ("Who wrote Hamlet?", _object(author={"anyOf": [SHORT, {"type": "null"}]}, sure={"type": "boolean"})),
    (
        "A point, please.",
        {"type": "array", "prefixItems": [{"type": "integer", "maximum": 99, "minimum": 0}] * 2, "items": False},
    ),
    ("A code.", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}),
    ("A person.", _object(name=SHORT, address=_object(street=SHORT, zip={"type": "string", "pattern": "^[0-9]{5}$"}))),
]


def _chat(engine: Engine, question: str) -> str:
    assert engine.tokenizer.template is not None
    return engine.tokenizer.template.render([{"role": "user", "content": question}])


@pytest.mark.slow
def test_smollm2_answers_by_a_schema(smollm: Engine, grammars: Grammars) -> None:
    prompts = [_chat(smollm, question) for question, _ in ASKED]
    plans = [grammars.json_schema(schema) for _, schema in ASKED]
    samplings = [Sampling(temperature=number % 2, seed=number) for number in range(len(ASKED))]
    answers = together(smollm, prompts, plans, samplings, 100)
    for (_, schema), (text, reason) in zip(ASKED, answers, strict=True):
        assert reason == "stop", text
        check(text, schema)


TOOLS = [
    GrammarTool("get_weather", _object(city=SHORT, days={"type": "integer", "minimum": 1, "maximum": 7}), strict=True),
    GrammarTool(
        "add", _object(a={"type": "integer", "maximum": 999}, b={"type": "integer", "maximum": 999}), strict=True
    ),
]
CHOICES: list[CallChoice] = ["required", "required", ForcedCall("get_weather"), ForcedCall("add")]


@pytest.mark.slow
def test_smollm2_calls_the_tools_that_it_must(smollm: Engine, grammars: Grammars) -> None:
    plans = [grammars.tools(HERMES, TOOLS, choice, parallel=False) for choice in CHOICES]
    entries = [plan for plan in plans if plan is not None]
    question = "What is the weather in Oslo for the next three days?"
    samplings = [Sampling(seed=number) for number in range(len(entries))]
    answers = together(smollm, [_chat(smollm, question)] * len(entries), entries, samplings, 100)
    for choice, (text, _) in zip(CHOICES, answers, strict=True):
        parser = Parser(
            HERMES,
            tools=[ToolSchema(tool.name, tool.parameters) for tool in TOOLS],
            thinking=ThinkingStart.UNOPENED,
            ids=call_id_maker("openai"),
        )
        events = merge_events([*parser.push(text), *parser.flush()])
        [began] = [event for event in events if isinstance(event, ToolCallBegan)]
        [arguments] = [json.loads(event.fragment) for event in events if isinstance(event, ToolCallArguments)]
        assert not any(isinstance(event, ContentDelta) for event in events)
        assert not isinstance(choice, ForcedCall) or began.name == choice.name
        jsonschema.validate(arguments, dict(next(tool.parameters for tool in TOOLS if tool.name == began.name)))
