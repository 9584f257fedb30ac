"""Which pages of a long row are seen."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache import attention_state
from ingot.cache.attention_state import AppendState, PageSelection
from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.pages import PAGE

HEADS, SIZE, PAGES = 2, 16, 20


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_state, "SPARSE_FROM_TOKENS", 4 * PAGE)
    monkeypatch.setattr(attention_state, "SEEN_PAGES", 6)
    monkeypatch.setattr(attention_state, "NEWEST_PAGES", 2)


class Layer:
    """One, and a row in it whose pages' keys lie around random directions."""

    def __init__(self) -> None:
        self.state = AppendState()
        self.rows = BatchState([self.state])
        self.row = self.rows.new()
        self.directions = mx.random.normal((PAGES, HEADS, SIZE), key=mx.random.key(1))
        self.choice = PageSelection(self.state, self.row)

    def write(self, begin: int, end: int) -> None:
        """Pages [begin, end)."""
        keys = mx.repeat(self.directions[begin:end], PAGE, axis=0)
        keys = keys + 0.3 * mx.random.normal(keys.shape, key=mx.random.key(begin))
        with self.rows.launch([ForwardPart((self.row,), keys.shape[0])]):
            self.state.write(keys, keys)
        mx.eval(self.rows.pending())

    def asking(self, *pages: int) -> mx.array:
        """[tokens, heads, size]: tokens that ask for these, by two heads for each that has keys."""
        return mx.repeat(self.directions[mx.array(pages)], 2, axis=1)

    def chosen(self, *pages: int, start: int = PAGES * PAGE) -> list[int] | None:
        found = self.choice(self.asking(*pages), 1.0, start)
        return None if found is None else np.array(found).tolist()


def test_pages_that_some_token_asks_for_are_seen_with_the_first_and_the_newest() -> None:
    layer = Layer()
    layer.write(0, PAGES)
    assert layer.chosen(5, 9, 13) == [0, 5, 9, 13, 18, 19]


def test_pages_that_came_since_are_known_too() -> None:
    layer = Layer()
    layer.write(0, 10)
    before = layer.chosen(5, 6, 7, start=10 * PAGE)
    assert before == [0, 5, 6, 7, 8, 9]
    layer.write(10, PAGES)
    assert layer.chosen(5, 12, 14) == [0, 5, 12, 14, 18, 19]


def test_a_page_that_is_not_full_is_not_chosen() -> None:
    layer = Layer()
    layer.write(0, PAGES)
    assert layer.chosen(5, 9, 10, start=15 * PAGE + 7) == [0, 5, 9, 10, 13, 14]


def test_behind_few_tokens_all_are_seen() -> None:
    layer = Layer()
    layer.write(0, PAGES)
    assert layer.chosen(5, start=4 * PAGE) is None and layer.chosen(5, start=6 * PAGE + 5) is None
