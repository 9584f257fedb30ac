"""What penalties look at, learned on the device."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.engine.penalties import TokenHistory, penalised
from ingot.engine.request import Sampling

VOCAB = 24
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(prompt=TOKENS, drawn=TOKENS)
def test_a_token_that_is_learned_counts_like_one_that_was_known(prompt: list[int], drawn: list[int]) -> None:
    learned = TokenHistory(VOCAB, prompt)
    for token in drawn:
        learned.learn(mx.array(token, dtype=mx.uint32))
    known = TokenHistory(VOCAB, prompt, drawn)
    assert mx.array_equal(learned.counts, known.counts).item()


def test_a_row_without_a_history_stays_as_it_is_to_the_last_bit() -> None:
    logits = mx.random.normal((2, VOCAB), key=mx.random.key(3))
    penalties = Sampling(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3)
    found = penalised(logits, [Sampling(), penalties], [None, TokenHistory(VOCAB, [1, 2], [3, 3])])
    assert mx.array_equal(found[0], logits[0]).item()
    assert sorted(np.flatnonzero(np.array(found[1]) != np.array(logits[1])).tolist()) == [1, 2, 3]


def test_the_logits_that_are_told_are_not_those_that_are_penalised() -> None:
    logits = mx.random.normal((1, VOCAB), key=mx.random.key(4))
    before = np.array(logits)
    penalised(logits, [Sampling(repetition_penalty=1.5)], [TokenHistory(VOCAB, [0, 1], [2])])
    assert np.array_equal(np.array(logits), before)
