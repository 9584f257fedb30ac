"""What Ollama's bodies become, and that every field of its package's types is honoured or refused by name."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from msgspec import Struct

from ingot.engine.request import Request, Sampling, Stop
from ingot.engine.status import ModelStatus
from ingot.errors import BadRequest, ModelNotFound, Unsupported
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.model_listings import ollama_running, ollama_tags, ollama_version_body, show_ollama_model
from ingot.protocol.ollama.answers import (
    OllamaChatAnswer,
    OllamaCompletionAnswer,
    StreamedOllamaAnswer,
    WholeOllamaAnswer,
)
from ingot.protocol.ollama.request import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
    read_ollama_chat,
    read_ollama_generate,
)
from ingot.protocol.pooling import OllamaEmbedBody
from ingot.protocol.served import ServedModel
from tests import scripted
from tests.http.scripted import settings

STANDS = ModelStatus("scripted", "loaded", resident=True)
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "é"}}}]}
OPENED = "<|im_start|>assistant\n"


@cache
def served() -> ServedModel:
    return ServedModel.of(scripted.CARD, scripted.tokenizer(), settings())


def answer(**body: Any) -> GenerationTask | Struct:
    return read_ollama_chat({"model": "scripted", "messages": [USER], **body}, served(), "req-1")


def chat(**body: Any) -> GenerationTask:
    job = answer(**body)
    assert isinstance(job, GenerationTask)
    return job


def generate(**body: Any) -> GenerationTask:
    job = read_ollama_generate({"model": "scripted", "prompt": "Hi", **body}, served(), "req-1")
    assert isinstance(job, GenerationTask)
    return job


def request(**options: Any) -> Request:
    return chat(options=options).request


def text(job: GenerationTask) -> str:
    return served().tokenizer.decode(job.request.prompts[0], skip_special=False)


def message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def ignored(job: GenerationTask) -> list[str]:
    assert job.head is not None
    return job.head.ignored


def names(body: type) -> set[str]:
    return {field.name for field in dataclasses.fields(body)}


def test_every_field_of_the_official_types_is_known() -> None:
    ollama = pytest.importorskip("ollama")
    types = ollama._types
    assert set(types.ChatRequest.model_fields) <= names(OllamaChatBody)
    assert set(types.GenerateRequest.model_fields) <= names(OllamaGenerateBody)
    assert set(types.EmbedRequest.model_fields) <= names(OllamaEmbedBody)
    assert set(types.Options.model_fields) <= names(OllamaOptions)


def test_the_least_that_can_be_asked_is_streamed() -> None:
    job = chat()
    assert isinstance(job.view, StreamedOllamaAnswer)
    assert (job.request.max_tokens, job.request.sampling, job.request.stop) == (None, Sampling(), Stop())
    assert text(job) == message("user", "Hi") + OPENED
    assert isinstance(chat(stream=False).view, WholeOllamaAnswer)


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("temperature", 0, {"temperature": 0.0}),
        ("top_k", 40, {"top_k": 40}),
        ("top_p", 0.9, {"top_p": 0.9}),
        ("min_p", 0.05, {"min_p": 0.05}),
        ("repeat_penalty", 1.1, {"repetition_penalty": 1.1}),
        ("presence_penalty", 1, {"presence_penalty": 1.0}),
        ("frequency_penalty", 1, {"frequency_penalty": 1.0}),
        ("seed", 42, {"seed": 42}),
        ("seed", -1, {}),
    ],
)
def test_options_reach_the_engine(option: str, value: Any, part: dict[str, Any]) -> None:
    assert request(**{option: value}).sampling == dataclasses.replace(Sampling(), **part)


@pytest.mark.parametrize(("values", "limit"), [(5, 5), (-1, None), (-2, None), (0, None), (None, None)])
def test_the_number_of_tokens_is_bounded_or_not(values: int | None, limit: int | None) -> None:
    assert request(num_predict=values).max_tokens == limit


@pytest.mark.parametrize("stop", ["END", ["END"]])
def test_stop_strings_reach_the_engine(stop: Any) -> None:
    assert request(stop=stop).stop == Stop(strings=("END",))


def test_a_window_of_no_tokens_switches_the_penalty_off() -> None:
    assert request(repeat_penalty=1.3, repeat_last_n=0).sampling.repetition_penalty == 1.0


def test_options_without_effect_are_named_in_the_receipt() -> None:
    options = {"num_gpu": 1, "num_ctx": 10**6, "num_thread": 8, "repeat_last_n": 64, "repeat_penalty": 1.1}
    assert ignored(chat(options=options)) == [
        "options.num_gpu",
        "options.num_thread",
        "options.num_ctx",
        "options.repeat_last_n",
    ]
    assert ignored(chat(options={"num_ctx": 4096, "mirostat": 0, "typical_p": 1.0}, keep_alive="5m")) == []
    assert ignored(chat(keep_alive=0)) == ["keep_alive"]


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_the_answer_is_held_to_a_format(form: Any) -> None:
    assert chat(format=form).request.grammar is not None
    assert chat(format="").request.grammar is None


def test_thinking_is_switched_and_bounded() -> None:
    assert text(chat(think=False)).endswith(OPENED + "<think>\n\n</think>\n\n")
    assert text(chat(think=True)) == text(chat())
    assert chat(think="low").request.grammar is not None


def test_calls_without_ids_are_answered_in_order_and_by_name() -> None:
    calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": name, "arguments": {}}} for name in ("look", "wait")],
    }
    results = [
        {"role": "tool", "tool_name": "wait", "content": "Waited."},
        {"role": "tool", "content": "Looked."},
    ]
    made = text(chat(messages=[USER, calls, *results], tools=[TOOL]))
    assert made.index("Waited.") < made.index("Looked.")


def test_a_result_of_no_call_is_refused_where_it_stands() -> None:
    result = {"role": "tool", "content": "Looked."}
    with pytest.raises(BadRequest) as raised:
        chat(messages=[USER, CALLS, result, result])
    assert raised.value.param == "messages.3"


def test_past_thinking_and_calls_are_shown() -> None:
    made = text(chat(messages=[USER, CALLS | {"thinking": "Hm."}, {"role": "tool", "content": "x"}]))
    assert "<think>\nHm.\n</think>" in made
    assert '{"name": "look", "arguments": {"at": "é"}}' in made


def test_a_last_message_of_the_assistants_is_continued() -> None:
    made = text(chat(messages=[USER, {"role": "assistant", "content": "The answer is ("}]))
    assert made == message("user", "Hi") + OPENED + "The answer is ("


def test_a_prompt_is_answered_as_a_conversation_or_continued_as_it_stands() -> None:
    assert text(generate(system="Be kind.")) == message("system", "Be kind.") + message("user", "Hi") + OPENED
    assert text(generate(raw=True)) == "Hi"


def test_logprobs_reach_the_engine() -> None:
    assert chat(logprobs=True, top_logprobs=3).request.sampling.logprobs == 3


def test_nothing_to_answer_is_told_that_the_model_is_loaded() -> None:
    made = answer(messages=[], keep_alive=0)
    assert isinstance(made, OllamaChatAnswer) and made.done_reason == "load" and made.done
    assert made.ingot.ignored == ["keep_alive"]  # type: ignore[union-attr]
    other = read_ollama_generate({"model": "scripted"}, served(), "req-1")
    assert isinstance(other, OllamaCompletionAnswer) and other.done_reason == "load"


@pytest.mark.parametrize("name", ["scripted", "scripted:latest", "default"])
def test_names_may_have_the_usual_tag(name: str) -> None:
    chat(model=name)


def test_another_model_is_a_404() -> None:
    with pytest.raises(ModelNotFound, match="scripted"):
        chat(model="llama3:8b")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER | {"images": ["AA=="]}]}, "messages.0.images"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"truncate": True}, "truncate"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as raised:
        chat(**body)
    assert raised.value.param == param


@pytest.mark.parametrize("field", ["suffix", "template", "images", "context"])
def test_what_completions_cannot_honour_is_refused_by_name(field: str) -> None:
    with pytest.raises(Unsupported, match=field):
        generate(**{field: ["x"] if field in ("images", "context") else "x"})


@pytest.mark.parametrize("field", ["system", "format", "think"])
def test_what_a_raw_prompt_leaves_out_is_refused(field: str) -> None:
    with pytest.raises(BadRequest, match="raw"):
        generate(raw=True, **{field: True if field == "think" else "json"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"format": "xml"}, "format"),
        ({"think": "hard"}, "think"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_what_is_out_of_bounds_is_refused_where_it_stands(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        chat(**body)
    assert raised.value.param == param


def test_models_are_listed_shown_and_told_to_be_loaded() -> None:
    [listed], [loaded] = ollama_tags([(STANDS, served())]).models, ollama_running([(STANDS, served())]).models
    assert (listed.name, listed.digest) == (loaded.name, loaded.digest)
    assert loaded.context_length == scripted.CARD.context
    shown = show_ollama_model({"model": "scripted"}, served())
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.model_info["scripted.context_length"] == scripted.CARD.context
    assert ollama_version_body().version.split(".")[0] == "0"
    with pytest.raises(ModelNotFound):
        show_ollama_model({"model": "missing"}, served())


def test_num_ctx_bounds_prompt_and_answer_together() -> None:
    length = len(chat().request.prompts[0])
    assert chat(options={"num_ctx": length + 5}).request.max_tokens == 5
    assert chat(options={"num_ctx": length + 5, "num_predict": 3}).request.max_tokens == 3
    assert chat(options={"num_ctx": length + 5, "num_predict": -1}).request.max_tokens == 5
    assert chat(options={"num_ctx": 0}).request.max_tokens is None
    assert ignored(chat(options={"num_ctx": length + 5})) == []


def test_a_prompt_that_num_ctx_has_no_room_for_is_refused_with_both_numbers() -> None:
    length = len(chat().request.prompts[0])
    with pytest.raises(BadRequest, match=f"{length} tokens, and options.num_ctx leaves {length}") as raised:
        chat(options={"num_ctx": length})
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "options.num_ctx")
