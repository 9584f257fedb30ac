from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from openai.types import completion_create_params as sdk

from ingot.engine.request import Ended, Event, Request, SequenceEnded, TextDelta, Timing, TokenInfo, TokenLogprob, Usage
from ingot.errors import BadRequest
from ingot.protocol.chat.answers import GenerationTask
from ingot.protocol.openai.completions import CompletionBody, StreamedCompletion, WholeCompletion, read_completion
from ingot.protocol.served import ServedModel
from tests.http.scripted import BOS, CARD, ByteTokenizer, hello, settings


def read(*, bos: bool = True, **body: Any) -> GenerationTask:
    tokenizer: Any = ByteTokenizer(bos=bos)
    return read_completion({"prompt": "Hi", **body}, ServedModel.of(CARD, tokenizer, settings()), "cmpl-1")


def request(**body: Any) -> Request:
    return read(**body).request


def whole(script: Any = hello, **body: Any) -> Any:
    job = read(**body)
    assert isinstance(job.view, WholeCompletion)
    for batch in script(job.request):
        for event in batch:
            job.view.take(event)
    return job.view.body()


def streamed(script: Any = hello, **body: Any) -> list[Any]:
    job = read(stream=True, **body)
    assert isinstance(job.view, StreamedCompletion)
    events: list[Event] = [event for batch in script(job.request) for event in batch]
    return [*job.view.opening(), *(chunk for event in events for chunk in job.view.chunks(event))]


def test_every_field_of_the_official_schema_is_known() -> None:
    official = set(sdk.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert official <= {field.name for field in dataclasses.fields(CompletionBody)}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ((BOS, 72, 105),)),
        (["H", "i"], ((BOS, 72), (BOS, 105))),
        ([72, 105], ((72, 105),)),
        ([[72], [105, 33]], ((72,), (105, 33))),
        ("", ((BOS,),)),
    ],
)
def test_a_prompt_is_text_or_tokens_one_or_many(prompt: Any, prompts: Any) -> None:
    assert request(prompt=prompt).prompts == prompts


def test_openais_default_of_sixteen_tokens_holds() -> None:
    assert request().max_tokens == 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [300]}, "prompt.0"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": ["x"] * 200, "n": 2}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
    ],
)
def test_what_is_out_of_bounds_is_refused_where_it_stands(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        read(**body)
    assert raised.value.param == param


def test_an_empty_prompt_of_a_model_without_a_first_token_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty"):
        read(prompt="", bos=False)


def test_a_whole_answer_has_one_choice_for_each_prompt_and_answer() -> None:
    body = whole(prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in body.choices] == [
        (index, "Hello, world", "stop") for index in range(4)
    ]


def test_echo_gives_the_prompt_back() -> None:
    assert whole(echo=True).choices[0].text == "HiHello, world"
    assert whole(echo=True, prompt=[BOS, 72]).choices[0].text == "<bos>HHello, world"
    assert streamed(echo=True)[0].choices[0].text == "Hi"


def test_echo_alone_may_ask_for_no_new_tokens() -> None:
    body = whole(echo=True, max_tokens=0)
    assert (body.choices[0].text, body.choices[0].finish_reason) == ("Hi", "length")


def test_echo_with_logprobs_scores_the_prompt_but_for_its_first_token() -> None:
    assert request(echo=True, logprobs=2).sampling.prompt_logprobs == 2
    logprobs = whole(echo=True, logprobs=2).choices[0].logprobs
    assert logprobs.tokens == ["<bos>", "H", "i", "Hello", ", ", "world"]
    assert logprobs.token_logprobs == [None, -1.0, -1.0, -0.5, -0.5, -0.5]
    assert logprobs.top_logprobs[0] is None
    assert logprobs.text_offset == [0, 0, 1, 2, 7, 9]


def test_streamed_logprobs_are_those_of_the_whole_answer() -> None:
    expected = whole(echo=True, logprobs=1).choices[0]
    chunks = [chunk.choices[0] for chunk in streamed(echo=True, logprobs=1)]
    assert "".join(chunk.text for chunk in chunks) == expected.text
    result = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in result for one in getattr(part, name)] == getattr(expected.logprobs, name)


def test_no_logprobs_are_told_unless_asked_for() -> None:
    assert request().sampling.logprobs is None
    assert whole(best_of=2).choices[0].logprobs is None


def test_a_part_of_a_character_is_spelled_out_and_has_no_width_until_it_is_whole() -> None:
    def script(made: Request) -> list[list[Event]]:
        halves = [TokenInfo(TokenLogprob(byte, "�", bytes([byte]), -0.1)) for byte in "é".encode()]
        after = TokenInfo(TokenLogprob(33, "!", b"!", float("-inf")))
        return [
            [TextDelta(0, "", (halves[0],)), TextDelta(0, "é", (halves[1],)), TextDelta(0, "!", (after,))],
            [SequenceEnded(0, "stop", None, 3), Ended(Usage(), Timing())],
        ]

    logprobs = whole(script, logprobs=0).choices[0].logprobs
    assert logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs.text_offset == [0, 0, 1]
    assert logprobs.token_logprobs[2] == -9999.0


def test_best_of_gives_the_likeliest_per_token_of_each_prompt() -> None:
    def script(made: Request) -> list[list[Event]]:
        assert (made.n, made.sampling.logprobs) == (3, 0)
        sums = [(-3.0, 3), (-1.0, 2), (-9.0, 10), (-2.0, 1), (-2.0, 4), (-2.0, 2)]
        events: list[Event] = [TextDelta(index, f"answer {index}") for index in range(6)]
        events += [SequenceEnded(index, "stop", None, count, total) for index, (total, count) in enumerate(sums)]
        return [events, [Ended(Usage(2, 22), Timing())]]

    body = whole(script, prompt=["a", "b"], n=2, best_of=3)
    assert [choice.text for choice in body.choices] == ["answer 1", "answer 2", "answer 4", "answer 5"]
    assert [choice.index for choice in body.choices] == [0, 1, 2, 3]
    assert body.usage.completion_tokens == 22


def test_a_stream_ends_each_choice_once_and_tells_the_receipt_last() -> None:
    chunks = streamed(prompt=["a", "b"])
    finished = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason is not None]
    assert sorted(finished) == [0, 1]
    assert [chunk.ingot is not None and bool(chunk.ingot) for chunk in chunks][-1]


def test_usage_is_the_streams_last_chunk_where_it_was_asked_for() -> None:
    *_, last = streamed(stream_options={"include_usage": True})
    assert (last.choices, last.usage.total_tokens) == ([], 6)
