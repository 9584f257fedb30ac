"""What is rare and stands at the end, too."""

from __future__ import annotations

import numpy as np

from ingot.engine.sparse.statistics_scorer import TAIL, by_statistics


def test_a_token_counts_where_the_end_has_it_and_the_more_the_rarer_it_is() -> None:
    prompt = (*([1] * 50), 7, *([2] * 50), 8, *([3] * (TAIL - 2)), 7, 1)
    scores = by_statistics(prompt)
    assert scores.shape == (len(prompt),) and scores.dtype == np.float32
    assert scores[50] == 0.5, "7 is there twice, and once at the end"
    assert scores[101] == 0 and scores[60] == 0, "8 and 2 are not at the end"
    assert scores[0] == np.float32(1 / 51)


def test_an_end_that_is_all_of_it_is_scored_by_how_rare_its_tokens_are() -> None:
    np.testing.assert_allclose(by_statistics((4, 4, 5)), [0.5, 0.5, 1.0])
