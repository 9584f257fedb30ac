from __future__ import annotations

import base64
import json
import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.request import PoolingOutput
from ingot.errors import BadRequest, InputTooLong, ModelNotFound, UnknownField, Unsupported
from ingot.protocol.pooling import EncodingTask, read_embeddings, read_ollama_embed, shorten_vector
from ingot.protocol.served import ServedTaskModel
from tests.encoders import CLS, SEP, offered
from tests.http.scripted import settings


def served(**changes: Any) -> ServedTaskModel:
    return ServedTaskModel.of(offered("embedding"), settings(**changes))


SERVED = served()


def read(input: Any, **fields: Any) -> EncodingTask:
    return read_embeddings({"input": input, **fields}, SERVED, "id")


def answer(job: EncodingTask, rows: list[list[float]] | None = None) -> Any:
    given = rows or [[0.6, 0.8, 0.0, 0.0]] * len(job.request.inputs)
    made = PoolingOutput(tuple(array("f", row) for row in given), job.request.tokens, 0.5, 0.25)
    return json.loads(job.make_body(made))


def raw(text: str) -> tuple[int, ...]:
    return (CLS, *text.encode(), SEP)


def test_a_text_a_list_of_texts_tokens_and_lists_of_tokens_are_taken() -> None:
    assert [piece.tokens for piece in read("ab").request.inputs] == [raw("ab")]
    assert [piece.tokens for piece in read(["a", "b"]).request.inputs] == [raw("a"), raw("b")]
    assert [piece.tokens for piece in read([1, 2]).request.inputs] == [(1, 2)]
    assert [piece.tokens for piece in read([[1, 2], [3]]).request.inputs] == [(1, 2), (3,)]


def test_the_answer_has_openais_shape() -> None:
    made = answer(read(["ab", "c"]))
    assert made["object"] == "list" and made["model"] == "toy-embedding"
    assert [(one["object"], one["index"]) for one in made["data"]] == [("embedding", 0), ("embedding", 1)]
    assert made["data"][0]["embedding"] == pytest.approx([0.6, 0.8, 0, 0])
    assert made["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert made["ingot"] == {"timing": {"queue_s": 0.5, "compute_s": 0.25}}


def test_base64_holds_the_same_numbers_as_little_endian_floats() -> None:
    made = answer(read("ab", encoding_format="base64"))
    packed = base64.b64decode(made["data"][0]["embedding"])
    assert struct.unpack("<4f", packed) == pytest.approx((0.6, 0.8, 0, 0))


def test_fewer_dimensions_are_cut_scaled_to_length_1_again_and_told_in_the_receipt() -> None:
    made = answer(read("ab", dimensions=1))
    assert made["data"][0]["embedding"] == [1.0]
    assert made["ingot"]["cut_from"] == 4
    assert "cut_from" not in answer(read("ab", dimensions=4))["ingot"]


@given(st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4), st.integers(1, 4))
def test_a_cut_vector_has_length_1_or_is_nothing(numbers: list[float], dimensions: int) -> None:
    cut = shorten_vector(array("f", numbers), dimensions, unit=True)
    assert len(cut) == dimensions
    if dimensions < 4 and sum(abs(number) for number in numbers[:dimensions]) > 1e-6:
        assert sum(number * number for number in cut) == pytest.approx(1, abs=1e-4)


def test_vectors_that_are_not_scaled_are_only_cut() -> None:
    assert list(shorten_vector(array("f", [3.0, 4.0]), 1, unit=False)) == [3.0]


def test_an_input_too_long_is_refused_with_both_numbers_and_its_place() -> None:
    with pytest.raises(InputTooLong, match=r"66 tokens.* 64 at most.*truncate") as refused:
        read(["a", "b" * 64])
    assert refused.value.param == "input.1" and refused.value.code == "context_length_exceeded"


def test_an_input_too_long_is_cut_where_that_is_asked_for_and_the_receipt_says_so() -> None:
    job = read(["a", "b" * 100], truncate=True)
    assert [len(piece.tokens) for piece in job.request.inputs] == [3, 64]
    assert answer(job)["ingot"]["truncated"] == 1


def test_a_prompt_of_the_models_files_is_put_before_each_text() -> None:
    assert read(["a", "b"], prompt_name="query").request.inputs[1].tokens == raw("Q:b")
    with pytest.raises(BadRequest, match='"query" or "document"'):
        read("a", prompt_name="other")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", 3]}, "input.1"),
        ({"input": [[]]}, "input.0"),
        ({"input": [300]}, "input.0"),
        ({"input": [-1]}, "input.0"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "user": 3}, "user"),
        ({"input": "a", "truncate": "END"}, "truncate"),
        ({"input": "a", "timeout": 0}, "timeout"),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_embeddings(body, SERVED, "id")
    assert refused.value.param == param


@pytest.mark.parametrize(
    "field", [{"input_type": "query"}, {"task": "retrieval"}, {"late_chunking": True}, {"embedding_type": "binary"}]
)
def test_fields_of_other_services_are_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as refused:
        read("a", **field)
    assert refused.value.param == next(iter(field))


def test_unknown_fields_are_named_or_refused() -> None:
    assert answer(read("a", colour="red"))["ingot"]["ignored"] == ["colour"]
    with pytest.raises(UnknownField, match="dimensions"):
        read("a", dimension=3)
    with pytest.raises(UnknownField):
        read_embeddings({"input": "a", "colour": 1}, served(strict=True), "id")


@pytest.mark.parametrize("name", ["toy-embedding", "default"])
def test_the_model_has_its_own_name_and_the_default_one(name: str) -> None:
    assert answer(read("a", model=name))["model"] == "toy-embedding"


@pytest.mark.parametrize("name", ["org/toy", "toy-rerank", "text-embedding-3-small"])
def test_a_model_that_makes_no_vectors_is_a_404_that_lists_those_that_do(name: str) -> None:
    with pytest.raises(ModelNotFound, match="'toy-embedding', 'default'"):
        read("a", model=name)


def test_a_deadline_is_the_requests_or_the_settings() -> None:
    short, long = read("a", timeout=1).request, read("a").request
    assert short.deadline is not None and long.deadline is not None and short.deadline < long.deadline


def test_options_of_ollamas_that_have_no_effect_are_held_to_the_embedding_models_vocabulary() -> None:
    asked = {"input": "ab", "options": {"stop_token_ids": [SERVED.card.vocab - 1]}}
    assert read_ollama_embed(asked, SERVED, "id").request.inputs
    with pytest.raises(BadRequest, match=f"from 0 to {SERVED.card.vocab - 1}"):
        read_ollama_embed({"input": "ab", "options": {"stop_token_ids": [SERVED.card.vocab]}}, SERVED, "id")
