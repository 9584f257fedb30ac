"""How much a draft's newest tokens attend to each token of a prompt, over all its layers and heads."""

from __future__ import annotations

from collections.abc import Sequence as Many

import mlx.core as mx
import numpy as np

from ingot.cache.launch import Row
from ingot.cache.layers import AppendState
from ingot.cache.pages import PAGE, pages_of
from ingot.cache.rows import Rows
from ingot.engine.sparse.selection import Scores
from ingot.models.layers.attention import Queries

SMOOTHED = 13
"""Neighbours that scores are averaged over: what matters is seldom one token."""
SLICE = 64
"""Pages whose keys are read at once."""


class Onlookers:
    """Gathers what tokens ask of the keys of each layer that keeps all of them, pass by pass."""

    def __init__(self, rows: Rows) -> None:
        # What windows have forgotten cannot be asked about.
        self.layers = [state for state in rows.states if type(state) is AppendState]
        self._asked: dict[AppendState, list[Queries]] = {state: [] for state in self.layers}

    def __enter__(self) -> Onlookers:
        for state in self.layers:
            state.onlooker = self._asked[state].append
        return self

    def __exit__(self, *_: object) -> None:
        for state in self.layers:
            state.onlooker = None

    def pending(self) -> list[mx.array]:
        return [asked.turned for layer in self._asked.values() for asked in layer]

    def scored(self, row: Row, tokens: int) -> Scores:
        """The scores of the row's first tokens: smoothed shares of attention, of whichever head and layer has most of
        it there, for whichever of the tokens that asked. Layer by layer, so that little of it exists at once."""
        best: mx.array | None = None
        for state, passes in self._asked.items():
            if passes:
                shares = smoothed(attended(joined(passes), state, row, tokens))
                seen = shares.max(axis=(0, 1))
                best = seen if best is None else mx.maximum(best, seen)
                mx.eval(best)
        assert best is not None, "nothing was asked of any layer"
        return np.array(best, dtype=np.float32)

    @property
    def answered(self) -> int:
        """Layers that were asked."""
        return sum(bool(passes) for passes in self._asked.values())


def joined(passes: Many[Queries]) -> Queries:
    first = passes[0]
    return Queries(mx.concatenate([each.turned for each in passes]), first.scale, first.cap, first.sinks)


def attended(asked: Queries, state: AppendState, row: Row, tokens: int) -> mx.array:
    """[heads, asking tokens, tokens]: the share of attention that each of the row's first tokens has. Keys are read a
    slice at a time."""
    table, heads = row.tables[state.group.number], asked.turned.shape[1]
    numbers = table.numbers[: pages_of(tokens)]
    products: list[mx.array] = []
    for begin in range(0, len(numbers), SLICE):
        pages = numbers[begin : begin + SLICE]
        coded = min(max(0, table.coded - begin), len(pages))
        keys = state.stored.gathered(state.group.index(pages, coded))[0][0, :, : tokens - begin * PAGE]
        products.append(_products(asked, keys))
        mx.eval(products[-1])
    shares = mx.concatenate(products, axis=-1)
    if asked.sinks is not None:
        sinks = mx.broadcast_to(asked.sinks.astype(mx.float32)[:, None, None], (heads, shares.shape[1], 1))
        return mx.softmax(mx.concatenate([shares, sinks], axis=-1), axis=-1)[..., :-1]
    return mx.softmax(shares, axis=-1)


def _products(asked: Queries, keys: mx.array) -> mx.array:
    """[heads, asking tokens, keys] of keys [heads that share them, keys, size]."""
    count, heads, size = asked.turned.shape
    shared = keys.shape[0]
    queries = asked.turned.astype(mx.float32).swapaxes(0, 1).reshape(shared, heads // shared * count, size)
    products = asked.scale * (queries @ keys.astype(mx.float32).swapaxes(-1, -2))
    if asked.cap is not None:
        products = asked.cap * mx.tanh(products / asked.cap)
    return products.reshape(heads, count, -1)


def smoothed(shares: mx.array) -> mx.array:
    """The mean of each number's neighbours, of so many as there are."""
    count, reach = shares.shape[-1], SMOOTHED // 2
    sums = mx.concatenate([mx.zeros((*shares.shape[:-1], 1)), mx.cumsum(shares, axis=-1)], axis=-1)
    begins = mx.maximum(mx.arange(count) - reach, 0)
    ends = mx.minimum(mx.arange(count) + reach + 1, count)
    return (mx.take(sums, ends, axis=-1) - mx.take(sums, begins, axis=-1)) / (ends - begins)
