"""Drawing tokens natively, against float64 by the definition of each filter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities after the filters."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    falling = np.sort(weights)[::-1][: top_k or None]
    before = np.cumsum(falling) - falling
    least = falling[(before < top_p * falling.sum()) | (np.arange(len(falling)) == 0)].min()
    weights[weights < max(least, min_p)] = 0
    return weights / weights.sum()


FILTERS = st.tuples(
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 40, 10_000]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.1, 1.0]),
)
"""Temperature, top-k, top-p and min-p."""
SPREADS = st.sampled_from([0.01, 1.0, 8.0])
Sample = Callable[[mx.array, list[tuple[float, int, float, float, float]]], mx.array]


def check_draws(sample: Sample, size: tuple[int, int], spread: float, filters: Any, seed: int) -> None:
    """Each row's token lies where the running sum of what is kept passes the row's draw."""
    dice, (temperature, top_k, top_p, min_p) = np.random.default_rng(seed), filters
    logits = (spread * dice.standard_normal(size)).astype(np.float32)
    places = dice.random(size[0])
    drawn = sample(mx.array(logits), [(*filters, float(at)) for at in places])
    assert drawn.dtype == mx.uint32
    for row, at, token in zip(logits, places, np.array(drawn), strict=True):
        # A filter's edge may fall on either side of a weight that rounding moves.
        for nudge in (0, 1e-5, -1e-5):
            shares = kept(row, temperature, top_k, min(1.0, top_p + nudge), max(0.0, min_p + nudge) if min_p else 0.0)
            running = np.cumsum(shares)
            if shares[token] > 0 and running[token] - shares[token] - 1e-5 <= at <= running[token] + 1e-5:
                break
        else:
            raise AssertionError((token, at))


@given(vocab=st.integers(1, 700), spread=SPREADS, filters=FILTERS, seed=st.integers(0, 1000))
def test_a_token_lies_where_the_running_sum_of_what_is_kept_passes_the_draw(
    vocab: int, spread: float, filters: Any, seed: int
) -> None:
    check_draws(native.sample_tokens, (6, vocab), spread, filters, seed)


def test_without_a_temperature_the_first_of_the_likeliest_is_taken() -> None:
    logits = np.random.default_rng(1).standard_normal((5, 333)).astype(np.float32)
    logits[2, [7, 300]] = 9
    logits[3] = -np.inf
    logits[3, 332] = -5
    drawn = native.sample_tokens(mx.array(logits), [(0.0, 0, 1.0, 0.0, 0.5)] * 5)
    assert np.array_equal(np.array(drawn), logits.argmax(axis=1))


def test_tokens_that_are_forbidden_are_never_drawn() -> None:
    logits = np.full((200, 50), -np.inf, dtype=np.float32)
    logits[:, [3, 44]] = 0
    drawn = native.sample_tokens(mx.array(logits), [(1.0, 0, 1.0, 0.0, number / 200) for number in range(200)])
    assert np.array_equal(np.array(drawn), [3] * 100 + [44] * 100)


def test_draws_that_do_not_fit_the_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="each row"):
        native.sample_tokens(mx.zeros((2, 8)), [(1.0, 0, 1.0, 0.0, 0.5)])
    with pytest.raises(ValueError, match="below"):
        native.sample_tokens(mx.zeros((1, 8)), [(-1.0, 0, 1.0, 0.0, 0.5)])
