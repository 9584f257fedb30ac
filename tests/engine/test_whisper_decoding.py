"""Which token may come next in a transcript."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.engine.whisper_decoding import (
    LATEST_FIRST_TIME,
    RULED_OUT,
    TimestampRules,
    choose_token,
    log_softmax,
    log_sum_exp,
)
from tests.hearing import VOCAB, timed, vocabulary

KNOWN = vocabulary()
FIRST, END = KNOWN.first_time, KNOWN.end
RULES = TimestampRules(KNOWN)


def allowed(written: list[int], *, likely: int | None = None) -> set[int]:
    scores = np.zeros(VOCAB, np.float32)
    if likely is not None:
        scores[likely] = 50.0
    return set(np.flatnonzero(RULES.apply(scores, written) != RULED_OUT).tolist())


def test_a_window_begins_with_a_time_in_its_first_second() -> None:
    assert allowed([]) == set(range(FIRST, FIRST + LATEST_FIRST_TIME + 1))


def test_text_follows_the_time_that_begins_a_segment() -> None:
    tokens = allowed(timed(0.5))
    assert ord("a") in tokens and END in tokens and not any(token >= FIRST for token in tokens)


def test_only_a_time_or_the_end_follows_the_time_that_ends_a_segment() -> None:
    tokens = allowed(timed(0.0, "hi", 2.0), likely=END)
    assert END in tokens and ord("a") not in tokens
    assert min(token for token in tokens if token >= FIRST) == FIRST + 100  # the same time again, and none before it


def test_times_never_go_back_and_a_segment_has_a_length() -> None:
    tokens = allowed(timed(1.0, "hi"), likely=ord("a"))
    assert ord("a") in tokens
    assert min(token for token in tokens if token >= FIRST) == FIRST + 51


def test_a_time_is_written_where_times_together_are_likelier_than_any_text() -> None:
    assert all(token >= FIRST for token in allowed(timed(0.0, "hi")))


def test_what_says_what_is_to_be_done_is_never_written() -> None:
    for token in (KNOWN.start, KNOWN.silent, KNOWN.untimed, KNOWN.transcribe, *KNOWN.languages.values(), ord("#")):
        assert token not in allowed(timed(0.0, "hi"), likely=ord("a"))


def test_shares_add_up_to_one_where_some_are_ruled_out() -> None:
    scores = np.array([1.0, -np.inf, 3.0], np.float32)
    assert np.exp(log_softmax(scores)).sum() == pytest.approx(1.0)
    assert log_sum_exp(np.full(3, RULED_OUT)) == RULED_OUT


def test_a_warm_draw_takes_tokens_as_often_as_they_are_likely() -> None:
    scores = np.log(np.array([0.7, 0.3], np.float32))
    draw = np.random.default_rng(1)
    drawn = [choose_token(scores, 1.0, draw) for _ in range(2000)]
    assert 0.25 < np.mean(drawn) < 0.35
    assert choose_token(scores, 0.0, draw) == 0
