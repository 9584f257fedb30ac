"""What a draft attends to."""

from __future__ import annotations

from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.engine.draft_model import DraftModel
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.attention_scores import SLICE, SMOOTHED, smoothed
from ingot.engine.sparse.draft_scorer import AHEAD, DraftScorer
from ingot.engine.sparse.selection import Scores
from ingot.engine.speculation.draft import Draft
from ingot.errors import ModelError
from ingot.models.adapter import Adapter
from tests import engines, tiny
from tests.engine.sparse.world import draft_model, some

TICKETS = count()
KINDS = [("llama", None), ("window", None), ("hybrid", None), ("moe", None), ("kernel", engines.GPU)]


def sequence(prompt: tuple[int, ...], **asked: Any) -> Sequence:
    number = next(TICKETS)
    return Sequence(Request(f"r{number}", (prompt,), **asked), 0, number, prompt, 100, 0)


def scored(scorer: DraftScorer, own: Sequence) -> tuple[Scores, int]:
    """The scores, and in how many pieces they came."""
    scoring, pieces = scorer.score(own), 0
    while True:
        try:
            next(scoring)
            pieces += 1
        except StopIteration as done:
            return done.value, pieces


def guessed(draft: Draft, row: Sequence) -> bool:
    """Whether it guesses something, once it has read."""
    for _ in range(4):
        assert draft.offers([row]) != [None]
        if draft.propose([row], [2])[0].tokens:
            return True
    return False


def mean_of_neighbours(shares: np.ndarray) -> np.ndarray:
    reach = SMOOTHED // 2
    return np.stack([shares[..., max(0, at - reach) : at + reach + 1].mean(-1) for at in range(shares.shape[-1])], -1)


def by_stock_layers(kind: str, prompt: tuple[int, ...]) -> np.ndarray:
    """The same by mlx-lm's own layers, from all queries and keys at once."""
    model, tokens = tiny.build(kind, seed=1), list(prompt)
    for _ in range(AHEAD):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    x, best = model.model.embed_tokens(mx.array([tokens])), np.zeros(0)
    for layer in model.model.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        heads, shared = attention.n_heads, attention.n_kv_heads
        queries, keys = (
            attention.rope(made.reshape(1, len(tokens), many, -1).swapaxes(1, 2))[0]
            for made, many in ((attention.q_proj(normed), heads), (attention.k_proj(normed), shared))
        )
        keys = mx.repeat(keys[:, : len(prompt)], heads // shared, axis=0)
        shares = mx.softmax(attention.scale * queries[:, len(prompt) - 1 :] @ keys.swapaxes(-1, -2), axis=-1)
        seen = mean_of_neighbours(np.array(shares)).max(0)
        best = np.maximum(best, seen) if best.size else seen
        x = layer(x, "causal", None)
    return best.max(0)


def test_scores_are_what_the_newest_tokens_attend_to_most_in_any_layer_and_head() -> None:
    prompt = some(200)
    told, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    np.testing.assert_allclose(told, by_stock_layers("llama", prompt), rtol=0.02, atol=1e-5)


@pytest.mark.parametrize(("kind", "device"), KINDS, ids=lambda value: str(getattr(value, "kind", value)))
def test_every_family_whose_attention_is_known_can_score_and_leaves_nothing_behind(kind: str, device: Any) -> None:
    model, prompt = draft_model(kind, device), some(700)
    scorer = DraftScorer(model)
    told, pieces = scored(scorer, sequence(prompt))
    assert told.shape == (700,) and np.isfinite(told).all() and 0 < told.max() <= 1 and pieces >= 3
    scorer.check()
    assert model.rows.count == 0


def test_a_next_turn_is_read_from_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, prompt, seen, run = DraftScorer(draft_model()), some(900), list[int](), Adapter.run

    def counting(self: Adapter, rows: Any, tokens: mx.array, *rest: Any, **more: Any) -> Any:
        seen.append(tokens.size)
        return run(self, rows, tokens, *rest, **more)

    monkeypatch.setattr(Adapter, "run", counting)
    scored(scorer, sequence(prompt[:800]))
    assert sum(seen) == 800 + 2 * AHEAD
    seen.clear()
    again = sequence(prompt)
    assert scorer.unread(again) == 100
    told, _ = scored(scorer, again)
    assert sum(seen) == 100 + 2 * AHEAD
    anew, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    np.testing.assert_allclose(told, anew, rtol=0.02, atol=1e-5)


def test_scoring_that_is_given_up_leaves_no_row_and_what_was_read() -> None:
    scorer, own = DraftScorer(draft_model()), sequence(some(2000))
    scoring = scorer.score(own)
    next(scoring)
    next(scoring)
    scoring.close()
    scorer.check()
    assert scorer.unread(own) <= 2000 - 512


def test_who_guesses_gives_way_to_who_scores() -> None:
    one = draft_model()
    room = one.budget.row_bytes(1536)
    aside = 1 - one.budget.states / (1 << 26)
    model = draft_model(states=int(1.4 * room / (1 - aside)))
    draft, scorer = Draft(model, vocab=tiny.VOCAB), DraftScorer(model)
    row = sequence(some(900))
    assert guessed(draft, row)
    assert model.rows.count == 1
    told, _ = scored(scorer, sequence(some(1400)))
    assert told.shape == (1400,) and model.rows.count == 0
    assert guessed(draft, row)


def test_what_one_has_read_the_other_need_not_read() -> None:
    model = draft_model()
    draft, scorer = Draft(model, vocab=tiny.VOCAB), DraftScorer(model)
    scored(scorer, sequence(some(900)))
    row = sequence(some(900))
    draft.offers([row])
    assert draft.propose([row], [2])[0].tokens  # at once: 900 tokens take more than one step
    draft.forget(row)
    assert scorer.unread(sequence(some(900))) == 1


def test_a_prompt_that_is_too_long_for_the_draft_is_none_that_it_can_score() -> None:
    scorer = DraftScorer(draft_model(states=1 << 19))
    assert scorer.able(sequence(some(100)))
    assert not scorer.able(sequence(some(4090))) and not scorer.able(sequence(some(4000)))


def test_a_model_whose_layers_tell_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: DraftModel = draft_model()
    monkeypatch.setattr(Adapter, "mixed", False, raising=False)
    object.__setattr__(model.adapter, "mixed", False)
    with pytest.raises(ModelError, match="cannot score prompts"):
        DraftScorer(model)
    assert model.rows.count == 0


def test_smoothing_is_the_mean_of_neighbours_also_at_the_ends() -> None:
    shares = mx.random.uniform(shape=(2, 3, 50), key=mx.random.key(0))
    np.testing.assert_allclose(np.array(smoothed(shares)), mean_of_neighbours(np.array(shares)), atol=1e-6)


def test_keys_of_several_slices_are_scored_like_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = some(500)
    whole, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    assert SLICE * 64 > 500
    monkeypatch.setattr("ingot.engine.sparse.attention_scores.SLICE", 2)
    sliced, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    np.testing.assert_allclose(sliced, whole, rtol=1e-4, atol=1e-7)
