from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadRequest, InputTooLong, ModelError
from ingot.text.tokenizer.encoder_inputs import (
    JUDGE_CLOSING,
    JudgeInputs,
    PairInputs,
    TextInputs,
    answer_tokens,
    load_encoder_vocabulary,
)
from tests.encoders import CLS, SEP, ByteVocabulary, write_words

BYTES: Any = ByteVocabulary()
TEXTS = TextInputs(BYTES, length=10, prompts={"query": "Q:", "document": ""})
PAIRS = PairInputs(BYTES, length=12)


def raw(text: str) -> list[int]:
    return list(text.encode())


def test_a_text_stands_between_the_models_own_marks() -> None:
    assert TEXTS.read("abc").tokens == (CLS, *raw("abc"), SEP)


def test_a_text_that_fits_exactly_is_read_and_one_token_more_is_refused_with_both_numbers() -> None:
    assert len(TEXTS.read("abcdefgh").tokens) == 10
    with pytest.raises(InputTooLong, match=r"11 tokens.* 10 at most") as refused:
        TEXTS.read("abcdefghi")
    assert (refused.value.needed, refused.value.limit) == (11, 10)


def test_a_text_that_may_be_cut_keeps_its_beginning_and_the_mark_at_its_end() -> None:
    piece = TEXTS.read("abcdefghij", truncate=True)
    assert (piece.tokens, piece.cut) == ((CLS, *raw("abcdefgh"), SEP), True)


def test_tokens_are_taken_as_they_stand() -> None:
    assert TEXTS.take([5, 6]).tokens == (5, 6)
    assert TEXTS.take(range(12), truncate=True).tokens == tuple(range(10))
    with pytest.raises(InputTooLong):
        TEXTS.take(range(11))


def test_a_prompt_stands_before_the_text_by_name_or_by_default() -> None:
    assert TEXTS.read("a", prompt="query").tokens == (CLS, *raw("Q:a"), SEP)
    always = TextInputs(BYTES, length=10, prompts={"query": "Q:"}, default_prompt="query")
    assert always.read("a").tokens == (CLS, *raw("Q:a"), SEP)


def test_a_model_that_wants_lower_case_gets_it() -> None:
    assert TextInputs(BYTES, length=10, lower_case=True).read("ÄB").tokens == (CLS, *raw("äb"), SEP)


def test_a_text_of_which_nothing_is_left_is_refused() -> None:
    class Bare(ByteVocabulary):
        def encode(self, text: str, *, add_special: bool) -> list[int]:
            return list(text.strip().encode())

    bare: Any = Bare()
    with pytest.raises(BadRequest, match="no tokens"):
        TextInputs(bare, length=10).read("  ")


def test_a_pair_has_marks_between_and_says_which_text_a_token_belongs_to() -> None:
    (piece,) = PAIRS.read("ab", ["cde"])
    assert piece.tokens == (CLS, *raw("ab"), SEP, *raw("cde"), SEP)
    assert piece.types == (0, 0, 0, 0, 1, 1, 1, 1)


@given(query=st.text("xy", min_size=1, max_size=7), documents=st.lists(st.text("abc", max_size=20), min_size=1))
def test_a_pair_that_may_be_cut_always_fits_and_loses_only_the_documents_end(query: str, documents: list[str]) -> None:
    for document, piece in zip(documents, PAIRS.read(query, documents, truncate=True), strict=True):
        assert len(piece.tokens) <= PAIRS.length and len(piece.types) == len(piece.tokens)
        before = (CLS, *raw(query), SEP)
        tokens_left = piece.tokens[len(before) : -1]
        assert piece.tokens[: len(before)] == before and piece.tokens[-1] == SEP
        assert list(tokens_left) == raw(document)[: len(tokens_left)] and piece.cut == (
            len(tokens_left) < len(raw(document))
        )


def test_a_pair_too_long_names_the_document_and_both_numbers() -> None:
    with pytest.raises(InputTooLong, match=r"13 tokens.* 12 at most") as refused:
        PAIRS.read("ab", ["c", "defghijk"])
    assert refused.value.param == "documents.1"


def test_a_query_that_leaves_no_room_is_refused_even_where_cutting_is_allowed() -> None:
    with pytest.raises(InputTooLong, match="query") as refused:
        PAIRS.read("abcdefghi", ["x"], truncate=True)
    assert refused.value.param == "query"


def test_a_document_is_read_up_to_as_many_tokens_as_were_asked_for() -> None:
    (piece,) = PAIRS.read("ab", ["cdefghijklmnop"], most=2)
    assert piece.tokens == (CLS, *raw("ab"), SEP, *raw("cd"), SEP) and piece.cut


def test_a_judge_is_asked_in_the_words_it_was_trained_with() -> None:
    inputs = JudgeInputs(BYTES, length=2000)
    pieces = inputs.read("Why?", ["Because."], instruction="Find reasons")
    text = BYTES.decode(pieces[0].tokens, skip_special=False)
    assert "<Instruct>: Find reasons\n<Query>: Why?\n<Document>: Because.<|im_end|>\n" in text
    assert text.startswith("<|im_start|>system\nJudge whether the Document") and text.endswith(JUDGE_CLOSING)
    assert "Given a web search query" in BYTES.decode(inputs.read("q", ["d"])[0].tokens, skip_special=False)


def test_a_judges_question_keeps_its_end_when_the_document_is_cut() -> None:
    room = len(JudgeInputs(BYTES, length=10_000).read("q", [""])[0].tokens) + 5
    inputs = JudgeInputs(BYTES, length=room)
    (piece,) = inputs.read("q", ["0123456789"], truncate=True)
    text = BYTES.decode(piece.tokens, skip_special=False)
    assert len(piece.tokens) == room and text.endswith("<Document>: 01234" + JUDGE_CLOSING)
    (short,) = inputs.read("q", ["0123456789"], most=3)
    assert BYTES.decode(short.tokens, skip_special=False).endswith("<Document>: 012" + JUDGE_CLOSING)
    with pytest.raises(InputTooLong, match=rf"{room + 5} tokens.* {room} at most"):
        inputs.read("q", ["0123456789"])


def test_a_vocabulary_without_yes_and_no_cannot_judge() -> None:
    with pytest.raises(ModelError, match="'yes'"):
        answer_tokens(BYTES)


def test_marks_of_a_real_tokenizer_file_are_found(tmp_path: Path) -> None:
    write_words(tmp_path)
    vocabulary = load_encoder_vocabulary(tmp_path)
    assert TextInputs(vocabulary, length=9).read("cat dog").tokens == (2, 4, 5, 3)
    (piece,) = PairInputs(vocabulary, length=9).read("cat", ["dog"])
    assert (piece.tokens, piece.types) == ((2, 4, 3, 5, 3), (0, 0, 0, 1, 1))


def test_an_end_mark_of_the_tokenizer_file_is_kept_whatever_its_ancestors_config_says(tmp_path: Path) -> None:
    write_words(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "eos_token": "[SEP]"}))
    assert TextInputs(load_encoder_vocabulary(tmp_path), length=9).read("cat").tokens == (2, 4, 3)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_eos_token": True, "eos_token": "[SEP]"}))
    assert TextInputs(load_encoder_vocabulary(tmp_path), length=9).read("cat").tokens == (4, 3)
