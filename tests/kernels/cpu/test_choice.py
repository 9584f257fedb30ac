"""Attention that chooses what its tokens see of the pages before them, against the same in float64."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from tests.kernels.cpu.attention_reference import Reference
from tests.kernels.cpu.paging import Rows

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

HEADS, KV_HEADS, SIZE = 4, 2, 32
SCALE = SIZE**-0.5


@dataclass(frozen=True)
class Text:
    """What the tokens of one sequence ask and are found by: each page's keys lie around a direction of their own."""

    q: np.ndarray  # [tokens, heads, size]
    k: np.ndarray  # [tokens, kv_heads, size]
    v: np.ndarray

    @classmethod
    def of(cls, tokens: int, page: int, seed: int = 0) -> Text:
        dice = np.random.default_rng(seed)
        around = np.repeat(2 * dice.standard_normal((-(-tokens // page), KV_HEADS, SIZE)), page, axis=0)[:tokens]
        keys, values = (dice.standard_normal((tokens, KV_HEADS, SIZE)) for _ in range(2))
        made = (dice.standard_normal((tokens, HEADS, SIZE)), around + keys, values)
        return cls(*(part.astype(np.float32) for part in made))

    def rounded(self) -> Text:
        """As pages of 16 bits hold it."""
        return Text(self.q, *(part.astype(np.float16).astype(np.float32) for part in (self.k, self.v)))


def chosen(text: Text, begin: int, end: int, page: int, choice: native.PageChoiceLimits) -> list[int]:
    """The pages that tokens [begin, end) see, of those that are full before them."""
    seen, newest, asking = choice
    full = begin // page
    if full <= seen or end - begin < asking:
        return list(range(full))
    means = text.k[: full * page].astype(np.float64).reshape(full, page, KV_HEADS, SIZE).mean(axis=1)
    products = np.einsum("thd,phd->thp", text.q[begin + asking - 1 : end : asking], _for_heads(means)) * SCALE
    shares = np.exp(products - products.max(axis=-1, keepdims=True))
    worth = (shares / shares.sum(axis=-1, keepdims=True)).max(axis=(0, 1))
    worth[[0, *range(full - newest, full)]] = 2
    return sorted(np.argsort(-worth, kind="stable")[:seen].tolist())


def expected(text: Text, begin: int, end: int, page: int, pages: list[int]) -> np.ndarray:
    """What tokens [begin, end) attend to in those pages, and in what comes behind all full ones."""
    keys = np.arange(end)
    shown = np.isin(keys // page, pages) | (keys >= begin // page * page)
    mask = shown & (keys <= np.arange(begin, end)[:, None])
    scores = np.einsum("thd,khd->htk", text.q[begin:end].astype(np.float64), _for_heads(text.k[:end])) * SCALE
    scores[:, ~mask] = -np.inf
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("htk,khd->thd", shares, _for_heads(text.v[:end])).reshape(end - begin, -1)


def _for_heads(keys: np.ndarray) -> np.ndarray:
    return np.repeat(keys.astype(np.float64), HEADS // KV_HEADS, axis=1)


def attended(
    text: Text, pieces: list[int], page: int, choice: native.PageChoiceLimits | None, *, halves: bool
) -> np.ndarray:
    """What the last of some pieces attends to, where all but the first choose."""
    reference = Reference(HEADS, KV_HEADS, SIZE, halves=halves)
    operation, tables, begin = reference.native(), Rows(1, sum(pieces), page, spare=3), 0
    keys, values = reference.states(tables.count, page)
    for number, width in enumerate(pieces):
        q, k, v = (mx.array(part[begin : begin + width].reshape(width, -1)) for part in (text.q, text.k, text.v))
        spans = native.attention_spans([(0, width, 0, begin, begin)], tables.tables(), None, choice if number else None)
        found, keys, values = operation(q, k, v, keys, values, spans)
        begin += width
    return np.array(found)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    ("page", "pieces", "choice"),
    [
        (64, [900, 200], (6, 2, 64)),
        (64, [1024, 64], (5, 0, 16)),
        (64, [700, 130, 260], (4, 1, 64)),  # the second time there are pages that were written since
        (128, [1300, 150], (4, 2, 50)),
        (64, [700, 20], (5, 1, 16)),  # so few that another kernel takes them
    ],
)
def test_tokens_see_the_pages_that_some_of_them_ask_for_most(
    page: int, pieces: list[int], choice: native.PageChoiceLimits, halves: bool
) -> None:
    text = Text.of(sum(pieces), page)
    begin, end = sum(pieces[:-1]), sum(pieces)
    told = text.rounded() if halves else text
    pages = chosen(told, begin, end, page, choice)
    assert len(pages) == choice[0] < begin // page and pages != list(range(begin // page))[-choice[0] :]
    found = attended(text, pieces, page, choice, halves=halves)
    wanted = expected(told, begin, end, page, pages)
    bound = 2e-2 if halves or native.has_wide() else 1e-4
    assert np.abs(found - wanted).max() < bound * np.abs(wanted).max()
    whole = expected(told, begin, end, page, list(range(begin // page)))
    assert np.abs(found - whole).max() > 0.1 * np.abs(wanted).max()  # what is hidden matters


@pytest.mark.parametrize(
    ("pieces", "choice"),
    [([500, 100], (7, 2, 64)), ([500, 100], (20, 2, 64)), ([700, 60], (4, 2, 64))],
    ids=["as many pages", "fewer pages", "nobody asks"],
)
def test_where_there_is_nothing_to_choose_all_is_seen(pieces: list[int], choice: native.PageChoiceLimits) -> None:
    text = Text.of(sum(pieces), 64)
    some, every = (attended(text, pieces, 64, each, halves=False) for each in (choice, None))
    assert np.array_equal(some, every)


def test_what_cannot_be_chosen_from_is_refused() -> None:
    table = (0, array("i", range(9)))
    one, two = [(0, 64, 0, 512, 512)], [(0, 32, 0, 512, 512), (32, 32, 0, 544, 544)]
    for spans, given, choice in [
        (two, table, (4, 2, 64)),
        (one, (2, array("i", range(9))), (4, 2, 64)),
        (one, table, (2, 2, 64)),
        (one, table, (4, -1, 64)),
        (one, table, (4, 2, 0)),
    ]:
        with pytest.raises(ValueError):
            native.attention_spans(spans, [given], None, choice)


def test_what_a_window_shows_is_not_chosen() -> None:
    reference = Reference(HEADS, KV_HEADS, SIZE)
    q, k = mx.zeros((64, HEADS * SIZE)), mx.zeros((64, KV_HEADS * SIZE))
    spans = native.attention_spans([(0, 64, 0, 512, 512)], [(0, array("i", range(9)))], None, (4, 2, 64))
    with pytest.raises(ValueError, match="window"):
        reference.native()(q, k, k, *reference.states(9, 64), spans, 100)
