from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.pooling import ServedPoolingModel
from ingot.engine.request import PoolingOutput
from ingot.errors import BadRequest, InputTooLong, ModelNotFound, Unsupported
from ingot.protocol.pooling import EncodingTask, read_rerank, sigmoid_score
from ingot.protocol.served import ServedTaskModel
from ingot.text.tokenizer.encoder_inputs import JudgeInputs
from tests.encoders import CLS, SEP, ByteVocabulary, card, offered
from tests.http.scripted import settings

JUDGE = ServedPoolingModel(
    card("rerank", length=2000), JudgeInputs(ByteVocabulary(), length=2000), offered("rerank").model
)  # type: ignore[arg-type]


def served(encoder: ServedPoolingModel) -> ServedTaskModel:
    return ServedTaskModel.of(encoder, settings())


SERVED = served(offered("rerank"))
DOCUMENTS = ["zero", {"text": "one"}, "two"]


def read(documents: Any = DOCUMENTS, query: Any = "q", **fields: Any) -> EncodingTask:
    return read_rerank({"query": query, "documents": documents, **fields}, SERVED, "id")


def answer(job: EncodingTask, scores: tuple[float, ...] = (0.0, 2.0, -1.0)) -> Any:
    rows = tuple(array("f", [score]) for score in scores[: len(job.request.inputs)])
    return json.loads(job.make_body(PoolingOutput(rows, job.request.tokens, 0.5, 0.25)))


def test_each_document_is_paired_with_the_query() -> None:
    pieces = read().request.inputs
    assert pieces[1].tokens == (CLS, *b"q", SEP, *b"one", SEP)
    assert pieces[1].types == (0, 0, 0, 1, 1, 1, 1)


def test_results_are_the_best_first_by_the_documents_place() -> None:
    made = answer(read())
    assert [result["index"] for result in made["results"]] == [1, 0, 2]
    assert [result["relevance_score"] for result in made["results"]] == pytest.approx(
        [0.880797, 0.5, 0.268941], abs=1e-5
    )
    assert all("document" not in result for result in made["results"])


def test_the_answer_serves_jinas_and_coheres_clients() -> None:
    job = read()
    made = answer(job)
    tokens = job.request.tokens
    assert (made["id"], made["object"], made["model"]) == ("id", "list", "toy-rerank")
    assert made["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert made["meta"] == {"api_version": {"version": "1"}, "tokens": {"input_tokens": tokens}}
    second = read_rerank({"query": "q", "documents": ["a"]}, SERVED, "id", version="2")
    assert answer(second)["meta"]["api_version"] == {"version": "2"}


def test_only_as_many_as_asked_for_are_given() -> None:
    assert [result["index"] for result in answer(read(top_n=2))["results"]] == [1, 0]
    assert len(answer(read(top_n=99))["results"]) == 3


def test_documents_are_given_back_where_that_is_asked_for() -> None:
    results = answer(read(return_documents=True))["results"]
    assert [result["document"]["text"] for result in results] == ["one", "zero", "two"]


def test_raw_scores_are_the_models_own() -> None:
    results = answer(read(raw_scores=True))["results"]
    assert [result["relevance_score"] for result in results] == [2.0, 0.0, -1.0]


def test_equal_scores_keep_the_documents_order() -> None:
    assert [result["index"] for result in answer(read(), (1.0, 1.0, 1.0))["results"]] == [0, 1, 2]


@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30))
def test_squashing_keeps_order_and_stays_between_0_and_1(one: float, two: float) -> None:
    assert 0 <= sigmoid_score(one) <= 1
    assert (sigmoid_score(one) <= sigmoid_score(two)) or one > two


def test_a_document_too_long_is_refused_with_both_numbers_and_its_place() -> None:
    with pytest.raises(InputTooLong, match=r"at least 100 tokens.* 64 at most") as refused:
        read(["a", "b" * 100])
    assert refused.value.param == "documents.1"


def test_a_document_is_cut_where_that_is_asked_for_and_the_receipt_says_so() -> None:
    cut = read(["a", "b" * 100], truncate=True)
    assert len(cut.request.inputs[1].tokens) == 64 and answer(cut)["ingot"]["truncated"] == 1
    limited = read(["a", "b" * 100], max_tokens_per_doc=5)
    assert [len(piece.tokens) for piece in limited.request.inputs] == [5, 9]


def test_a_query_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(InputTooLong) as refused:
        read(query="q" * 70, truncate=True)
    assert refused.value.param == "query"


def test_an_instruction_is_for_models_that_take_one() -> None:
    with pytest.raises(Unsupported, match="cross-encoder"):
        read(instruction="Find reasons")
    body = {"query": "q", "documents": ["d"], "instruction": "Find reasons"}
    tokens = read_rerank(body, served(JUDGE), "id").request.inputs[0].tokens
    assert b"<Instruct>: Find reasons\n<Query>: q\n<Document>: d" in bytes(tokens)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": [3]}, "documents.0"),
        ({"query": "q", "documents": [{"image": "x"}]}, "documents.0.text"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_rerank(body, SERVED, "id")
    assert refused.value.param == param


@pytest.mark.parametrize(
    "field", [{"rank_fields": ["title"]}, {"max_chunks_per_doc": 4}, {"priority": 3}, {"relevant_spans": {}}]
)
def test_what_cannot_be_honoured_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as refused:
        read(**field)
    assert refused.value.param == next(iter(field))


def test_what_asks_for_nothing_is_taken() -> None:
    assert read(rank_fields=["text"], max_chunks_per_doc=1, priority=0).request.inputs


def test_other_fields_of_a_document_are_named_as_ignored() -> None:
    made = answer(read([{"text": "a", "title": "t"}, {"text": "b", "title": "u"}]))
    assert made["ingot"]["ignored"] == ["documents.*.title"]


def test_another_model_is_a_404_that_lists_those_that_rerank() -> None:
    with pytest.raises(ModelNotFound, match="'toy-rerank', 'default'"):
        read(model="rerank-v3.5")
