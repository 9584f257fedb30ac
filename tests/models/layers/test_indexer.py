"""What indexers choose of long sequences, against each token by itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.batch_state import BatchState
from ingot.cache.forward_batch import ForwardPart, MixedBatch
from ingot.models.families.description import IndexerSpec
from ingot.models.forward import new_batch_state
from ingot.models.layers import indexer
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.indexer import ChosenTokens, Indexer
from ingot.models.layers.rope import swap_ropes
from ingot.models.layers.swapping import swap_mixers
from tests.models.layers import family_configs

BLOCKS = IndexerSpec(module=None, weights=None, block="block", local="local")


class Chosen:
    """An indexer of a tiny model, the states of its batch, and what it chose."""

    def __init__(self, name: str) -> None:
        model = family_configs.build(name)
        swap_ropes(model)
        swap_mixers(model, unfused=True)
        self.rows: BatchState = new_batch_state(model, 0, None)
        self.attention: Any = next(
            each
            for _, each in sorted(model.named_modules())
            if isinstance(each, MixedAttention) and each.token_indexer is not None
        )
        self.number = next(n for n, each in enumerate(self.rows.layers) if len(each.caches) > 1)

    def run(self, x: mx.array, *parts: ForwardPart) -> dict[int, mx.array | ChosenTokens]:
        own = self.attention.token_indexer
        with self.rows.launch(parts) as layers:
            state: Any = layers[self.number]
            mixed: MixedBatch = state.whole
            own.write_keys(x, state.caches[1], mixed)
            found: dict[int, Any] = own.choose(x, lambda: self.attention._index_input(x), state.caches[1], mixed)
            mx.eval([each.at if isinstance(each, ChosenTokens) else each for each in found.values()])
        return found


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl"])
def test_a_token_is_shown_as_much_alone_as_in_a_prompt_and_beside_a_longer_row(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, states = Chosen(name), Chosen(name)
    x = mx.random.normal((1, 41, 32), key=mx.random.key(1))
    whole = prompts.run(x, ForwardPart((prompts.rows.new(),), 41))[0]
    monkeypatch.setattr(indexer, "MOST_SCORES", 1)  # a token at a time
    again = Chosen(name)
    assert mx.array_equal(again.run(x, ForwardPart((again.rows.new(),), 41))[0], whole)
    one, longer = states.rows.new(), states.rows.new()
    states.run(
        mx.concatenate([x[:, :40], x[:, :40], x[:, :20]], axis=1), ForwardPart((one,), 40), ForwardPart((longer,), 60)
    )
    both = states.run(mx.concatenate([x[:, 40:]] * 2, axis=1), ForwardPart((one, longer), 1))[0]
    assert isinstance(both, ChosenTokens) and isinstance(whole, mx.array)
    groups = both.at.shape[1]
    seen = both.seen[0, :: both.seen.shape[1] // groups, 0]
    shown = [
        sorted(at for at, is_seen in zip(*each, strict=True) if is_seen)
        for each in zip(both.at[0].tolist(), seen.tolist(), strict=True)
    ]
    masks = whole[0, :: max(1, whole.shape[1] // groups), -1].tolist()
    assert shown == [[at for at, is_seen in enumerate(mask) if is_seen] for mask in masks]


def test_rows_that_are_no_longer_than_what_may_be_chosen_see_everything() -> None:
    states = Chosen("deepseek_v32")
    row, other = states.rows.new(), states.rows.new()
    assert not states.run(mx.random.normal((1, 31, 32)), ForwardPart((row,), 16), ForwardPart((other,), 15))
    assert [*states.run(mx.random.normal((1, 2, 32)), ForwardPart((other,), 1), ForwardPart((row,), 1))] == [1]


def test_of_equal_scores_the_earlier_tokens_are_chosen() -> None:
    states = Chosen("deepseek_v32")
    row = states.rows.new()
    states.run(mx.zeros((1, 40, 32)), ForwardPart((row,), 40))
    chosen = states.run(mx.zeros((1, 1, 32)), ForwardPart((row,), 1))[0]
    assert isinstance(chosen, ChosenTokens) and chosen.at.tolist() == [[[*range(16)]]]


def test_the_newest_blocks_are_chosen_before_better_ones() -> None:
    parts = nn.Module()
    parts.n_heads, parts.index_topk, parts.block, parts.local = 1, 2, 4, 1
    own = Indexer(parts, BLOCKS, 2, 1)
    scores = mx.array([9.0, 0, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0, -1, -1])[None, None, None]
    best = own._block_scores(scores, mx.ones((1, 1, 1, 14), dtype=mx.bool_))
    assert best.tolist() == [[[[9.0, 1.0, 5.0, float("inf")]]]]
