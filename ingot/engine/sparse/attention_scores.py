"""How much a draft's newest tokens attend to each token of a prompt, over all its layers and heads."""

from __future__ import annotations

from collections.abc import Sequence as Many

import mlx.core as mx
import numpy as np

from ingot.cache.attention_state import AppendState
from ingot.cache.batch_state import Rows
from ingot.cache.forward_batch import Row
from ingot.cache.page_groups import PageGroup
from ingot.cache.pages import PAGE, pages_of
from ingot.cache.pools import PageIndex
from ingot.engine.specprefill.selection import CHUNK, Scores
from ingot.models.layers.attention import Queries

BEHIND = 8
"""Tokens behind a chunk whose shares it is given as well: what a token knows of a prompt stands at it or before it."""
SLICE = 256
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
        """The scores of the row's first tokens, a chunk's the same: the share of attention that the chunk has of
        whichever head and layer gives it most, for whichever of the tokens that asked. Layer by layer, of which two
        are under way, so that little of it exists at once."""
        assert self.answered, "nothing was asked of any layer"
        slices, best, before = Slices(row, tokens), list[mx.array](), mx.array(0.0)
        for state, passes in self._asked.items():
            if passes:
                best.append(by_chunks(attended(joined(passes), state, slices)).max(axis=(0, 1)))
                mx.async_eval(best[-1])
                mx.eval(before)
                before = best[-1]
        return np.repeat(np.array(mx.stack(best).max(axis=0), dtype=np.float32), CHUNK)[:tokens]

    @property
    def answered(self) -> int:
        """Layers that were asked."""
        return sum(bool(passes) for passes in self._asked.values())


class Slices:
    """A row's first tokens, as many at once as keys are read of: found once for all layers of a group."""

    def __init__(self, row: Row, tokens: int) -> None:
        self._row, self._tokens = row, tokens
        self._found: dict[int, list[tuple[PageIndex, int]]] = {}

    def of(self, group: PageGroup) -> list[tuple[PageIndex, int]]:
        """The pages of each slice, and how many tokens are in it."""
        if group.number not in self._found:
            table = self._row.tables[group.number]
            numbers = table.numbers[: pages_of(self._tokens)]
            self._found[group.number] = [
                (group.index(numbers[begin : begin + SLICE], max(0, table.coded - begin)), self._tokens - begin * PAGE)
                for begin in range(0, len(numbers), SLICE)
            ]
        return self._found[group.number]


def joined(passes: Many[Queries]) -> Queries:
    first = passes[0]
    turned = first.turned if len(passes) == 1 else mx.concatenate([each.turned for each in passes])
    return Queries(turned, first.scale, first.cap, first.sinks)


def attended(asked: Queries, state: AppendState, slices: Slices) -> mx.array:
    """[heads, asking tokens, tokens]: the share of attention that each of the row's first tokens has. Keys are read a
    slice at a time."""
    count, heads, size = asked.turned.shape
    shared = state.stored.heads
    queries = (asked.scale * asked.turned.astype(mx.float32)).swapaxes(0, 1)
    queries = queries.reshape(shared, heads // shared * count, size)
    products: list[mx.array] = []
    for index, tokens in slices.of(state.group):
        keys, _ = state.stored.gathered(index)
        products.append(queries @ keys[0, :, :tokens].astype(mx.float32).swapaxes(-1, -2))
        mx.async_eval(products[-1])
    shares = products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)
    shares = shares.reshape(heads, count, -1)
    if asked.cap is not None:
        shares = asked.cap * mx.tanh(shares / asked.cap)
    if asked.sinks is None:
        return mx.softmax(shares, axis=-1)
    sinks = mx.broadcast_to(asked.sinks.astype(mx.float32)[:, None, None], (heads, count, 1))
    return mx.softmax(mx.concatenate([shares, sinks], axis=-1), axis=-1)[..., :-1]


def by_chunks(shares: mx.array) -> mx.array:
    """[..., chunks] of shares [..., tokens]: what the tokens of each chunk have of them, and the first behind it."""
    count = shares.shape[-1]
    chunks = -(-count // CHUNK)
    if count % CHUNK:
        shares = mx.pad(shares, [(0, 0)] * (shares.ndim - 1) + [(0, -count % CHUNK)])
    tokens = shares.reshape(*shares.shape[:-1], chunks, CHUNK)
    behind = tokens[..., 1:, :BEHIND].sum(axis=-1)
    return tokens.sum(axis=-1) + mx.pad(behind, [(0, 0)] * (shares.ndim - 1) + [(0, 1)])
