import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundry import corpus
from foundry.lesson import HELD_OUT
from foundry.rerank.lessons import PASSAGES, search
from foundry.rerank.rows import LENGTH, rows
from foundry.rerank.wordpiece import SIZE, tokenizer

seeds = st.integers(0, HELD_OUT - 1)


@given(seeds)
def test_a_search_has_its_passages_all_different_from_the_right_one(seed):
    asked = search(seed, held_out=True)
    assert len(asked.passages) == PASSAGES
    assert asked.passages[0] not in asked.passages[1:]


@given(seeds)
def test_only_the_right_passage_has_all_keywords(seed):
    asked = search(seed, held_out=True)
    if asked.kind == "keywords":
        words = [set(re.findall("[a-z]+", passage.lower())) for passage in asked.passages]
        assert [set(asked.query.split()) <= each for each in words] == [True] + [False] * (PASSAGES - 1)


@given(seeds)
def test_a_search_depends_on_its_seed_alone(seed):
    assert search(seed, held_out=True) == search(seed, held_out=True)


@pytest.mark.parametrize("seed", [-1, HELD_OUT])
def test_a_seed_cannot_reach_into_the_held_out_ones(seed):
    with pytest.raises(ValueError, match="seed"):
        search(seed)


def test_held_out_searches_look_in_held_out_documents():
    text = " ".join(" ".join(corpus.documents(held_out=True)).split())
    found = [asked for asked in (search(seed, held_out=True) for seed in range(60)) if asked.kind == "keywords"]
    assert found and all(passage in text for asked in found for passage in asked.passages)


def test_a_row_is_a_query_and_a_passage_between_marks():
    asked = search(4, held_out=True)
    made = rows([asked])
    assert made.tokens.shape == (1, PASSAGES, LENGTH)
    row, segments, there = made.tokens[0, 0], made.segments[0, 0], made.there[0, 0]
    start, stop, pad = (tokenizer().token_to_id(mark) for mark in ("[CLS]", "[SEP]", "[PAD]"))
    assert row[0] == start and (row == stop).sum() == 2 and row[there][-1] == stop
    assert (row[~there] == pad).all() and (np.diff(segments[there]) >= 0).all() and segments[there][-1] == 1


def test_the_vocabulary_has_its_size():
    assert tokenizer().get_vocab_size() == SIZE
