import numpy as np
import pytest

from foundry import vocabulary
from foundry.recall import OPENING, PAIR, pairs_in, probe_rows, recall_rows
from foundry.rows import lesson, packed


@pytest.mark.parametrize("length", [16, 100, 1024])
def test_a_repeated_key_has_the_value_it_had_before_and_only_its_value_counts(length):
    rows = recall_rows(np.random.default_rng(1), 6, length, 2)
    for tokens, weights in zip(rows.tokens, rows.weights, strict=True):
        pairs = tokens[length - PAIR * pairs_in(length) :].reshape(-1, PAIR)
        counts = weights[length - PAIR * pairs_in(length) :].reshape(-1, PAIR)
        known: dict[int, int] = {}
        for (key, value, _), (on_key, on_value, on_stop) in zip(pairs.tolist(), counts.tolist(), strict=True):
            assert on_key == on_stop == 0
            assert on_value == (key in known)
            assert known.setdefault(key, value) == value


def test_a_probe_asks_at_its_end_for_facts_that_were_all_told_once():
    rows = probe_rows(0, 3, 512, 16)
    assert rows.tokens.shape == (3, 512)
    assert (rows.weights.sum(axis=1) == 16).all()
    assert (np.flatnonzero(rows.weights[0]) > 512 - PAIR * 16).all()


def test_a_probe_is_text_that_encodes_back_to_its_tokens():
    row = probe_rows(0, 1, 300, 8).tokens[0].tolist()
    text = vocabulary.tokenizer().decode(row)
    assert text.startswith(OPENING)
    assert vocabulary.encoded(text) == row


def test_probes_of_a_seed_never_change():
    assert (probe_rows(7, 2, 256, 8).tokens == probe_rows(7, 2, 256, 8).tokens).all()
    assert (probe_rows(7, 2, 256, 8).tokens != probe_rows(8, 2, 256, 8).tokens).any()


def test_a_packed_row_counts_what_the_model_writes_and_nothing_else():
    rows = packed((lesson(seed) for seed in range(1000)), "xml", 1024, count=2)
    end = vocabulary.encoded("<|im_end|>")[0]
    ends = (rows.tokens == end) & (rows.weights > 0)
    assert ends.any()
    assert 0.02 < rows.weights.mean() < 0.6
    # What is counted ends, whenever it ends, with the end of the turn.
    stops = (rows.weights[:, :-1] > 0) & (rows.weights[:, 1:] == 0)
    assert (rows.tokens[:, :-1][stops] == end).all()
